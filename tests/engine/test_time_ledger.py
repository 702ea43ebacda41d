"""The time of a run stands in its folder, by phase, and sums to the wall clock."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.observe.events import read_events
from surefoot.observe.time_ledger import Phase, add_stretch
from surefoot.trainer import Trainer

SLOW = 0.002


class SlowData(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SLOW)
        return torch.ones(2) * index / 64, torch.ones(1)


def slow_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(2 * SLOW)
    if len(batch[0]) == 3:
        raise ArithmeticError
    return (model(batch[0]) - batch[1]).square().sum()


def train(runs: Path, resume: Path | None = None, horizon: int = 40) -> dict[str, Any]:
    settings = {
        "train": {"horizon": f"{horizon} steps", "micro_batch": 4},
        "schedule": {"kind": "constant"},
        "evaluate": {"every": "10 steps"},
        "checkpoint": {"every": "10 steps"},
        "log": {"console": "off"},
    }
    trainer = Trainer(
        nn.Linear(2, 1), SlowData(), slow_loss, validation=SlowData(), settings=settings, runs=runs
    )
    folder = trainer.fit(resume=resume).folder
    assert folder is not None
    ledger: dict[str, Any] = json.loads((folder / "artifacts" / "time-ledger.json").read_text())
    return {"folder": folder, **ledger}


def test_the_phases_sum_to_the_wall_clock_and_say_where_it_went(tmp_path: Path) -> None:
    found = train(tmp_path)
    (stretch,) = found["stretches"]
    seconds = dict(stretch["host_seconds"])
    wall = seconds.pop("wall")
    assert sum(seconds.values()) == pytest.approx(wall, abs=1e-4)
    assert set(seconds) == {phase.label for phase in Phase}
    # Between two moments that the ledger knows nothing of.
    events = list(read_events(found["folder"] / "events.jsonl"))
    begun = next(event.time for event in events if event.kind == "start")
    ended = next(event.time for event in events if event.kind == "finished")
    assert wall == pytest.approx(ended - begun, rel=0.02, abs=0.05)
    # 160 samples and 40 losses; 4 evaluations of 64 samples and 16 losses.
    assert seconds["data wait"] >= 160 * SLOW
    assert seconds["launch"] >= 40 * 2 * SLOW
    assert seconds["evaluation"] >= 4 * (64 * SLOW + 16 * 2 * SLOW)
    assert seconds["checkpoint"] > 0 and seconds["logging"] > 0
    assert (stretch["first_step"], stretch["last_step"]) == (0, 40)
    assert stretch["device_milliseconds"] is None
    (told,) = [event for event in events if event.kind == "ledger"]
    assert told.data == stretch and "s of this process" in told.message


def test_each_process_of_a_run_has_its_stretch(tmp_path: Path) -> None:
    folder = train(tmp_path, horizon=10)["folder"]
    stretches = train(tmp_path, resume=folder, horizon=20)["stretches"]
    assert [(s["first_step"], s["last_step"]) for s in stretches] == [(0, 10), (10, 20)]
    assert len({s["attempt"] for s in stretches}) == 2


def test_a_failed_run_says_where_its_time_went(tmp_path: Path) -> None:
    settings = {"train": {"horizon": "9 steps", "micro_batch": 3}, "log": {"console": "off"}}
    trainer = Trainer(nn.Linear(2, 1), SlowData(), slow_loss, settings=settings, runs=tmp_path)
    with pytest.raises(ArithmeticError):
        trainer.fit()
    (ledger,) = tmp_path.glob("*/artifacts/time-ledger.json")
    (stretch,) = json.loads(ledger.read_text())["stretches"]
    assert stretch["last_step"] == 0 and stretch["host_seconds"]["wall"] > 0


def test_a_stretch_replaces_that_of_the_same_process(tmp_path: Path) -> None:
    path = tmp_path / "artifacts" / "time-ledger.json"
    for attempt, step in ((1, 3), (2, 5), (2, 7)):
        add_stretch(path, {"attempt": attempt, "last_step": step})
    held = json.loads(path.read_text())["stretches"]
    assert [s["last_step"] for s in held] == [3, 7]
