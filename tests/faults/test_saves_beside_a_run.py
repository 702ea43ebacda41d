"""Whole runs that save beside the training: the same checkpoints as those of a run that waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from faults.runs_for_faults import INPUTS, TARGETS, fit, settings, squared_error_sum
from parallel.rank_pool import RankPool
from surefoot import Trainer
from surefoot.observe.events import read_events
from surefoot.state.checkpoint import list_checkpoints, newest_whole, read_checkpoint

CHECKPOINT = {"every": "2 steps", "keep": 20}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def on_ranks(runs: str, mode: str, shards: int, resume: str, horizon: str) -> str:
    trainer = Trainer(
        model(),
        (INPUTS, TARGETS),
        squared_error_sum,
        validation=(INPUTS, TARGETS),
        settings=settings(
            train={"horizon": horizon, "micro_batch": 2},
            checkpoint={**CHECKPOINT, "mode": mode},
            parallel={"shard": shards},
            evaluate={"every": "5 steps"},
        ),
        runs=Path(runs),
    )
    return str(trainer.fit(resume=Path(resume) if resume else None).folder)


def contents(run: str | Path) -> dict[str, Any]:
    """Every checkpoint of a run: its values and tensors."""
    found = {}
    for folder in list_checkpoints(Path(run) / "checkpoints"):
        _, snapshot = read_checkpoint(folder)
        values = dict(snapshot.values)
        values["progress"] = {**values["progress"], "spent_seconds": None}
        # Rows hold times, of which some have more digits than others.
        values["log_offsets"] = None
        found[folder.name] = values, {name: snapshot.tensors[name] for name in snapshot.tensors}
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any], count: int) -> None:
    assert one.keys() == other.keys() and len(one) == count
    for name, (values, tensors) in one.items():
        assert values == other[name][0], name
        assert tensors.keys() == other[name][1].keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, other[name][1][key]), f"{key} in {name}"


def test_one_rank(tmp_path: Path) -> None:
    runs = {
        mode: fit(
            tmp_path / mode,
            model(),
            train={"horizon": "12 steps"},
            checkpoint={**CHECKPOINT, "mode": mode},
            ema={"kind": "on", "decay": 0.9},
        ).folder
        for mode in ("sync", "async")
    }
    assert runs["sync"] is not None and runs["async"] is not None
    assert_same(contents(runs["sync"]), contents(runs["async"]), 6)
    saves = [event for event in read_events(runs["async"] / "events.jsonl") if event.kind == "save"]
    assert len(saves) == 6
    for event in saves:
        assert float(str(event.data["stalled_seconds"])) <= float(str(event.data["seconds"]))


@pytest.mark.parametrize("shards", [1, 2], ids=["replicas", "shards"])
def test_two_ranks(ranks: RankPool, tmp_path: Path, shards: int) -> None:
    folders = {
        mode: ranks.run(2, on_ranks, str(tmp_path / mode), mode, shards, "", "12 steps")
        for mode in ("sync", "async")
    }
    assert folders["async"][0] == folders["async"][1]
    assert_same(contents(folders["sync"][0]), contents(folders["async"][0]), 6)
    # And it goes on from there.
    run = folders["async"][0]
    assert ranks.run(2, on_ranks, "", "async", shards, run, "16 steps") == [run, run]
    assert newest_whole(Path(run) / "checkpoints")[1].step == 16
