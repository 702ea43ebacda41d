"""One value says what is watched, which way it is better, why a run ends and what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import ClassificationTask, FunctionTask, GenerationTask, RunResult, Trainer
from surefoot.core.errors import RequestError
from surefoot.observe.readers.run_data import read_run


def fit(runs: Path, **changes: Any) -> RunResult:
    """Forty samples of chance labels: what is learnt of them shows in training alone."""
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(n, 8, generator=generator) for n in (32, 40))
    y, w = (torch.randint(0, 2, (n,), generator=generator) for n in (32, 40))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    settings = {
        "train": {"horizon": "12 epochs", "micro_batch": 8},
        "optimizer": {"lr": 0.01},
        "device": "cpu",
        "log": {"console": "off"},
        **changes.pop("settings", {}),
    }
    parts = {"task": ClassificationTask(2), "validation": (v, w), **changes}
    return Trainer(model, (x, y), settings=settings, runs=runs, **parts).fit()


def evaluations(run: RunResult, metric: str) -> list[tuple[int, float]]:
    assert run.folder is not None
    rows = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["metrics"][metric]) for row in rows if row["row"] == "eval"]


def notes(run: RunResult) -> list[str]:
    assert run.folder is not None
    events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    return [event["message"] for event in events if event["kind"] == "note"]


def saved(run: RunResult) -> list[int]:
    assert run.folder is not None
    return sorted(
        int(p.name.removeprefix("step-")) for p in (run.folder / "checkpoints").glob("s*")
    )


def stopping(**fields: Any) -> dict[str, Any]:
    return {"early_stopping": {"kind": "on", "patience": 2, **fields}}


def test_the_direction_is_the_task_s_and_the_reason_speaks_of_the_metric(tmp_path: Path) -> None:
    for fields in ({"metric": "accuracy"}, {}, {"metric": "validation/accuracy"}):
        run = fit(tmp_path, settings=stopping(**fields))
        values = evaluations(run, "accuracy")
        best_step, best = max(values, key=lambda pair: (pair[1], -pair[0]))
        assert "accuracy has not improved for 2 evaluations" in run.reason
        assert f"best {best} at step {best_step}" in run.reason
        assert run.step == best_step + 2 * 4, "two evaluations of four updates each"


def test_the_best_step_of_the_watched_metric_is_kept_without_asking(tmp_path: Path) -> None:
    run = fit(tmp_path, settings=stopping(metric="loss", patience=3))
    best_step = min(evaluations(run, "loss"), key=lambda pair: pair[1])[0]
    assert best_step < run.step and {best_step, run.step} <= set(saved(run))
    assert f"at step {best_step}" in run.reason and "loss" in run.reason
    assert run.folder is not None
    assert read_run(run.folder).deciding == (None, "loss", "min")


def test_without_a_decision_by_a_metric_only_what_was_asked_is_saved(tmp_path: Path) -> None:
    assert saved(fit(tmp_path)) == [48]
    best = {"checkpoint": {"save_best": "on"}}
    assert len(saved(fit(tmp_path, settings=best))) > 1
    off = {**stopping(), "checkpoint": {"save_best": "off"}}
    run = fit(tmp_path, settings=off)
    assert saved(run) == [run.step]


def test_a_metric_whose_direction_nobody_says_is_refused(tmp_path: Path) -> None:
    def squares(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    task = FunctionTask(squares, metrics={"score": lambda m, b: (m(b[0]).sum(), len(b[0]))})
    with pytest.raises(RequestError, match="which way score is better") as caught:
        fit(tmp_path, task=task, settings=stopping(metric="score"))
    assert "early_stopping.direction=max" in caught.value.remedy
    assert not list(tmp_path.iterdir())
    fit(tmp_path, task=task, settings=stopping(metric="score", direction="max"))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embed(input_ids))
        return scores


def sentences(labelled: bool) -> list[dict[str, Tensor]]:
    ids = [torch.arange(i, i + 8) for i in range(8)]
    return [{"input_ids": i, "labels": i if labelled else torch.full_like(i, -100)} for i in ids]


def test_a_validation_set_without_targets_is_named_and_ends_no_run(tmp_path: Path) -> None:
    settings = {
        "train": {"horizon": "8 epochs", "micro_batch": 4},
        "device": "cpu",
        "log": {"console": "off"},
        **stopping(),
    }
    run = Trainer(
        Words(),
        sentences(True),
        GenerationTask(32),
        validation=sentences(False),
        settings=settings,
        runs=tmp_path,
    ).fit()
    assert (run.step, run.reason) == (16, "the horizon is reached")
    (said,) = (note for note in notes(run) if "the validation set validation is empty" in note)
    assert "8 samples" in said
