"""The ten signals that a run is judged by all stand in its metrics, as numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.observe.events import read_events
from surefoot.observe.metrics_log import read_rows
from surefoot.tasks.classification import ClassificationTask
from surefoot.trainer import Trainer

UPDATES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two validation sets, in which the inputs of one update are not finite."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(32, 5), torch.arange(32) % 3
    inputs[7] = math.nan
    slices = {name: (torch.randn(6, 5), torch.arange(6) % 3) for name in ("day", "night")}
    settings = {
        "train": {"horizon": "1 epoch", "micro_batch": 8},
        "evaluate": {"every": "2 steps"},
        "guard": {"non_finite": "skip"},
        "log": {"console": "off", "weight_norm_every": "1 steps"},
        "device": "cpu",
    }
    task = ClassificationTask(3)
    runs = tmp_path_factory.mktemp("runs")
    trainer = Trainer(
        nn.Linear(5, 3), (inputs, labels), task, validation=slices, settings=settings, runs=runs
    )
    found = trainer.fit().folder
    assert found is not None
    return found


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [dict(row) for row in read_rows(folder / "metrics.jsonl") if row["row"] == kind]


@pytest.mark.parametrize(
    "column",
    ["loss", "lr", "grad_norm", "weight_norm", "memory_bytes", "step_seconds", "data_seconds"],
)
def test_a_signal_of_each_update(column: str, folder: Path) -> None:
    found = [row for row in rows(folder, "step") if row["applied"]]
    assert len(found) == UPDATES - 1
    for row in found:
        values = row[column].values() if isinstance(row[column], dict) else [row[column]]
        assert all(math.isfinite(value) and value > 0 for value in values)


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_a_signal_of_each_evaluation_and_slice(metric: str, folder: Path) -> None:
    found = rows(folder, "eval")
    assert {row["name"] for row in found} == {"day", "night"}
    assert all(math.isfinite(row["metrics"][metric]) for row in found)


def test_what_is_not_finite_is_a_row_and_an_event(folder: Path) -> None:
    (row,) = (row for row in rows(folder, "step") if not row["applied"])
    assert row["loss"] == "NaN"
    kinds = [event.kind for event in read_events(folder / "events.jsonl")]
    assert kinds.count("skip") == 1
