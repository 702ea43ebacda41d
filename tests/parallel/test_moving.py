"""Checkpoints move between layouts: what one has saved, another goes on with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.checks import assert_alike
from parallel.rank_pool import RankPool
from parallel.small_runs import Seen, settings_of, train, train_on

SECTIONS: dict[str, Any] = {
    "ema": {"kind": "on", "decay": 0.8},
    "evaluate": {"micro_batch": 4, "weights": "ema"},
    "log": {"weight_norm_every": "1 steps"},
}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "DDP": (2, 2, {}),
    "ZeRO-1": (2, 2, {"shard": 2, "shards": "optimizer"}),
    "ZeRO-2": (4, 4, {"shard": 4, "shards": "gradients"}),
    "ZeRO-3": (4, 4, {"shard": 4}),
    "HSDP": (4, 4, {"shard": 2, "replicate": 2}),
    "TP": (2, 1, {"tensor": 2}),
    "TP+SPxFSDP": (4, 2, {"tensor": 2, "shard": 2, "cut_sequence": True}),
    "CP": (2, 1, {"context": 2}),
    "CPxFSDP": (4, 2, {"context": 2, "shard": 2}),
    "PP": (2, 1, {"pipeline": 2, "pipeline_schedule": "zero-bubble"}),
    "PPxFSDP": (4, 2, {"pipeline": 2, "shard": 2}),
    "TPxPP": (4, 1, {"tensor": 2, "pipeline": 2, "pipeline_schedule": "gpipe"}),
}
AROUND = (
    *("one", "DDP", "ZeRO-3", "TP", "HSDP", "TP+SPxFSDP", "ZeRO-1", "ZeRO-2"),
    *("PP", "CP", "PPxFSDP", "CPxFSDP", "TPxPP", "one"),
)
"""Each goes on with what the one before has saved."""
UPDATES = 3


@cache
def alone() -> Seen:
    settings = settings_of(**SECTIONS)
    return train("gpt", settings, UPDATES * len(AROUND), torch.float64)


def leg(settings: Any, folder: str, until: int, resume: bool) -> Seen:
    return train_on(settings, folder, until, resume=resume)


def test_one_run_through_all_layouts(ranks: RankPool, tmp_path: Path) -> None:
    losses: list[float] = []
    for index, name in enumerate(AROUND):
        num_ranks, data_ranks, parallel = LAYOUTS[name]
        settings = settings_of(data_ranks, parallel=parallel, **SECTIONS)
        until = UPDATES * (index + 1)
        found = ranks.run(num_ranks, leg, settings, str(tmp_path), until, index > 0)
        assert all(seen.losses == found[0].losses for seen in found)
        losses += found[0].losses
        assert losses == pytest.approx(alone().losses[: len(losses)], rel=1e-10), name
    expected = alone()
    expected.losses, expected.norms, expected.counts, expected.weight_norms = (
        list(values[-UPDATES:])
        for values in (expected.losses, expected.norms, expected.counts, expected.weight_norms)
    )
    found[0].metrics |= {k: expected.metrics[k] for k in ("samples", "weight")}
    assert_alike(found, expected, 1e-10)
