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
    "EP": (2, 2, {"expert": 2}),
    "EP of 4": (4, 4, {"expert": 4}),
    "EPxDP": (4, 4, {"expert": 2, "replicate": 2}),
    "EPxFSDP": (4, 4, {"expert": 2, "shard": 2}),
}
AROUND = (
    *("one", "DDP", "ZeRO-3", "TP", "HSDP", "TP+SPxFSDP", "ZeRO-1", "ZeRO-2"),
    *("PP", "CP", "PPxFSDP", "CPxFSDP", "TPxPP", "one"),
)
"""Each goes on with what the one before has saved."""
WITH_EXPERTS = (
    *("one", "EP", "EPxFSDP", "ZeRO-3", "EP of 4", "DDP", "EPxDP", "CPxFSDP", "EPxFSDP", "one"),
)
EXPERTS: dict[str, Any] = {"num_experts": 4, "balance": "bias", "bias_rate": 0.01}
UPDATES = 3


@cache
def alone(has_experts: bool) -> Seen:
    around = WITH_EXPERTS if has_experts else AROUND
    return train(
        "gpt",
        settings_of(**SECTIONS),
        UPDATES * len(around),
        torch.float64,
        experts=EXPERTS if has_experts else "none",
    )


def leg(settings: Any, folder: str, until: int, resume: bool, has_experts: bool) -> Seen:
    experts = EXPERTS if has_experts else "none"
    return train_on(settings, folder, until, resume=resume, experts=experts)


@pytest.mark.parametrize(
    ("around", "has_experts"),
    [
        pytest.param(AROUND, False, id="dense"),
        pytest.param(WITH_EXPERTS, True, id="experts", marks=pytest.mark.ranks_full),
    ],
)
def test_one_run_through_all_layouts(
    ranks: RankPool, tmp_path: Path, around: tuple[str, ...], has_experts: bool
) -> None:
    losses: list[float] = []
    for index, name in enumerate(around):
        num_ranks, data_ranks, parallel = LAYOUTS[name]
        settings = settings_of(data_ranks, parallel=parallel, **SECTIONS)
        until = UPDATES * (index + 1)
        found = ranks.run(num_ranks, leg, settings, str(tmp_path), until, index > 0, has_experts)
        assert all(seen.losses == found[0].losses for seen in found)
        losses += found[0].losses
        assert losses == pytest.approx(alone(has_experts).losses[: len(losses)], rel=1e-10), name
    expected = alone(has_experts)
    expected.losses, expected.norms, expected.counts, expected.weight_norms = (
        list(values[-UPDATES:])
        for values in (expected.losses, expected.norms, expected.counts, expected.weight_norms)
    )
    found[0].metrics |= {k: expected.metrics[k] for k in ("samples", "weight")}
    assert_alike(found, expected, 1e-10)
