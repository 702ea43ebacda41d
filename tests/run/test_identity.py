"""Runs of other models, tasks or first weights are other experiments; `compare` says which."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot import ClassificationTask, Trainer
from surefoot.assembly.run_parts import Material
from surefoot.data.sources.arrays import ArraySource
from surefoot.judge.compare import RunComparison, compare_runs
from surefoot.observe.readers.run_data import RunData, read_run
from surefoot.run.identity import FRESH, identity_of
from surefoot.tasks.given import as_task

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)


def trainer(model: nn.Module, runs: Path, seed: int = 0, task: Any = None) -> Trainer:
    settings = {
        "train": {"horizon": "8 steps", "micro_batch": 16},
        "optimizer": {"lr": 0.01},
        "device": "cpu",
        "log": {"console": "off"},
        "seed": seed,
    }
    task = task or ClassificationTask(3)
    return Trainer(model, (X, Y), task, validation=(X, Y), settings=settings, runs=runs)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 3))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))


def run_of(make: Callable[[], nn.Module], runs: Path, seed: int = 0) -> RunData:
    torch.manual_seed(seed)
    folder = trainer(make(), runs, seed).fit().folder
    assert folder is not None
    return read_run(folder)


def named(comparison: RunComparison, area: str) -> dict[str, tuple[str, ...]]:
    return {fact.name: fact.values for fact in comparison.facts if fact.area == area}


def test_two_models_of_three_seeds_are_two_experiments(tmp_path: Path) -> None:
    runs = [run_of(make, tmp_path, seed) for make in (small, wide) for seed in range(3)]
    found = compare_runs(runs)
    assert [experiment.label for experiment in found.experiments] == ["A, B, C", "D, E, F"]
    result = next(r for r in found.results if r.metric == "validation/loss")
    assert result.before is not None
    assert result.after is not None
    assert result.before.mean != result.after.mean
    differing = named(found, "model")
    assert differing["model.modules"][2:4] == ("1 Linear", "2 Linear, 1 ReLU")
    assert len({*differing["model.structure"]}) == 2


def test_seeds_of_one_model_are_one_experiment(tmp_path: Path) -> None:
    found = compare_runs([run_of(small, tmp_path, seed) for seed in range(2)])
    assert [experiment.label for experiment in found.experiments] == ["A, B"]
    assert named(found, "model") == {}


def test_a_second_fit_says_that_it_begins_from_trained_weights(tmp_path: Path) -> None:
    twice = trainer(small(), tmp_path)
    first, second = twice.fit().folder, twice.fit().folder
    assert first is not None
    assert second is not None
    events = [json.loads(line) for line in (second / "events.jsonl").read_text().splitlines()]
    (said,) = (e["message"] for e in events if "begins from trained weights" in e["message"])
    assert f"{first.name} at step 8" in said
    found = compare_runs([read_run(first), read_run(second)])
    assert [experiment.label for experiment in found.experiments] == ["A", "B"]
    begun = named(found, "model")["begins from"]
    assert begun == (FRESH, f"weights of {first.name} at step 8")
    assert "begins from" not in (first / "events.jsonl").read_text()


def sum_of_squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - 1.0).square().sum()


def sum_of_errors(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - 1.0).abs().sum()


class Own(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 3), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(self.drop(x))
        return scores


class Other(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x)


Other.__qualname__ = "Own"


def identity(model: nn.Module, task: Any) -> dict[str, Any]:
    found = identity_of(Material(model, as_task(task), ArraySource(X)), resuming=True)
    return {"model": found["model"], "task": found["task"]}


def test_shapes_settings_of_layers_code_and_losses_tell_apart() -> None:
    plain = identity(Own(), sum_of_squares)
    assert plain == identity(Own(), sum_of_squares)
    for other in (
        identity(Own(0.5), sum_of_squares),
        identity(Own().double(), sum_of_squares),
        identity(Own().requires_grad_(False), sum_of_squares),
        identity(Own(), sum_of_errors),
        identity(Own(), ClassificationTask(3)),
    ):
        assert other != plain
    assert identity(Own(), ClassificationTask(3)) != identity(
        Own(), ClassificationTask(3, label_smoothing=0.1)
    )
    assert identity(Other(), sum_of_squares)["model"]["code"] != plain["model"]["code"]


def test_initial_weights_are_recorded_where_a_run_begins() -> None:
    material = Material(small(), ClassificationTask(3), ArraySource((X, Y)))
    begun = identity_of(material, resuming=False)
    assert begun["begins_from"] == FRESH and len(begun["initial_weights"]) == 32
    assert "initial_weights" not in identity_of(material, resuming=True)
