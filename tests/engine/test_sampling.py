"""Signals of sampled windows: there when due, the same after a resume, no part of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.core.errors import ModelError
from surefoot.engine.measure.sampling import watched
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import DETAILS, deterministic, reduced
from surefoot.state.checkpoint import list_checkpoints
from surefoot.tasks.generation import GenerationTask
from surefoot.trainer import Trainer
from surefoot.verify.state_hash import checkpoint_hash


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().sum()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)
        with torch.no_grad():
            self.first.weight[:2] = 0.0
            self.first.bias[:2] = -1.0  # Two units of eight are dead, and stay so.

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.relu(self.first(inputs)))
        return output


def train(
    runs: Path,
    model: nn.Module | None = None,
    resume: Path | None = None,
    steps: int = 12,
    **log: Any,
) -> Path:
    torch.manual_seed(0)
    model = model or Perceptron()
    inputs = torch.randn(64, 4)
    settings = {
        "train": {
            "horizon": f"{steps} steps",
            "micro_batch": 8,
            "accumulation": 2,
            "clip_norm": 1e-3,
        },
        "schedule": {"kind": "constant"},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        "evaluate": {"every": "never"},
        "checkpoint": {"every": "5 steps"},
        "log": {"console": "off", **log},
    }
    data = (inputs, inputs.sum(1, keepdim=True))
    folder = Trainer(model, data, squared_error, settings=settings, runs=runs).fit(resume).folder
    assert folder is not None
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in read_rows(folder / "metrics.jsonl")]


def test_sampled_windows_have_details_and_others_none(tmp_path: Path) -> None:
    folder = train(tmp_path, details_every="4 steps", layers=["first.*"])
    found = rows(folder)
    assert [row["window"] for row in found if row["details"]] == [2, 6, 10]
    details = found[5]["details"]
    assert details.keys() == {
        "update_ratio", "dead_units", "clip_fraction",
        "grad_norm/first.weight", "grad_norm/first.bias",
        "weight_norm/first.weight", "weight_norm/first.bias",
    }  # fmt: skip
    assert 0.25 <= details["dead_units"] <= 0.5 and details["clip_fraction"] == 1.0
    assert 1e-4 < details["update_ratio"] < 0.1
    assert all(row["grad_norm"] > row["details"].get("grad_norm/first.weight", 0) for row in found)
    known = {column.name for column in DETAILS}
    assert {name.partition("/")[0] for name in details} <= {n.partition("/")[0] for n in known}


def test_sampling_changes_no_weight(tmp_path: Path) -> None:
    hashes, losses = set(), []
    for number, every in enumerate(("1 steps", "4 steps", "never")):
        folder = train(tmp_path / str(number), details_every=every)
        weights = list_checkpoints(folder / "checkpoints")[-1] / "model.safetensors"
        hashes.add(weights.read_bytes())
        losses.append([(row["loss"], row["grad_norm"]) for row in rows(folder)])
    assert len(hashes) == 1 and losses[0] == losses[1] == losses[2]


def test_a_resumed_run_samples_the_same(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", details_every="4 steps")
    folder = train(tmp_path / "cut", steps=5, details_every="4 steps")
    train(tmp_path / "cut", resume=folder, details_every="4 steps")
    assert [deterministic(r) for r in rows(folder)] == [deterministic(r) for r in rows(whole)]
    last = [checkpoint_hash(list_checkpoints(f / "checkpoints")[-1]) for f in (whole, folder)]
    assert last[0] == last[1]


def test_padding_waste_of_token_tasks(tmp_path: Path) -> None:
    shape = GPTConfig.llama(
        vocabulary_size=16, sequence_length=8, num_layers=1, num_heads=1, num_kv_heads=1,
        embedding_dim=8,
    )  # fmt: skip
    labels = torch.randint(0, 16, (16, 8))
    labels[:, 4:] = -100
    data = {"input_ids": torch.randint(0, 16, (16, 8)), "labels": labels}
    settings = {
        "train": {"horizon": "2 steps", "micro_batch": 4},
        "evaluate": {"every": "never"},
        "log": {"console": "off", "details_every": "1 steps"},
    }
    trainer = Trainer(GPT(shape), data, GenerationTask(16), settings=settings, runs=tmp_path)
    folder = trainer.fit().folder
    assert folder is not None
    # Three of eight positions predict something: the first predicts nothing, four are masked.
    assert [row["details"]["padding_waste"] for row in rows(folder)] == [0.625] * 2


def test_a_module_that_changed_its_mode_is_named(tmp_path: Path) -> None:
    class Sleepy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.dropout = nn.Linear(4, 1), nn.Dropout(0.1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.last(self.dropout(inputs))
            self.dropout.eval()
            return output

    with pytest.raises(ModelError, match="changed their mode"):
        train(tmp_path, Sleepy(), details_every="4 steps")


def test_few_weights_over_the_whole_depth_are_copied() -> None:
    parameters = [torch.zeros(10) for _ in range(32)]
    chosen = watched(parameters, most=45)
    places = [next(i for i, p in enumerate(parameters) if p is c) for c in chosen]
    assert places == [8, 16, 24, 4] or (len(places) == 4 and min(places) < 16 < max(places))
    assert watched(parameters, most=320) == parameters
    assert watched([torch.zeros(10)], most=5) == []


def test_rows_are_reduced_as_the_schema_says(tmp_path: Path) -> None:
    folder = train(tmp_path, details_every="4 steps")
    found = rows(folder)[:3]
    found[0] |= {"weight": 10.0, "loss": 1.0}
    found[1] |= {"weight": 30.0, "loss": 2.0}
    found[2] |= {"weight": 0.0, "loss": "NaN", "memory_bytes": 1, "applied": False}
    one = reduced(found)
    assert (one["weight"], one["loss"], one["step"]) == (40.0, 1.75, found[2]["step"])
    assert one["memory_bytes"] == max(row["memory_bytes"] for row in found)
    assert one["step_seconds"] == pytest.approx(sum(row["step_seconds"] for row in found))
    assert one["applied"] == pytest.approx(2 / 3) and one["clipped"] == 1.0
    assert one["weight_norm"] is None and one["row"] == "step"
