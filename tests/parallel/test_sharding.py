"""Sharded models train as one process does, whatever is cut and when."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from parallel.checks import assert_alike
from parallel.rank_pool import RankPool
from parallel.small_runs import Seen, settings_of, train

DOUBLE, SINGLE = torch.float64, torch.float32


@cache
def alone(dtype: torch.dtype, optimizer: str = "adamw") -> Seen:
    return train("gpt", settings_of(**sections(optimizer)), dtype=dtype)


def sections(optimizer: str) -> dict[str, Any]:
    kinds = {
        "adamw": {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1},
        "sgd": {"kind": "sgd", "lr": 3e-2, "momentum": 0.9},
    }
    return {
        "optimizer": kinds[optimizer],
        "ema": {"kind": "on", "decay": 0.8},
        "evaluate": {"micro_batch": 4, "weights": "ema"},
        "log": {"weight_norm_every": "1 steps"},
    }


def sharded(parallel: dict[str, Any], num_ranks: int, optimizer: str = "adamw") -> dict[str, Any]:
    return settings_of(num_ranks, parallel=parallel, **sections(optimizer))


@pytest.mark.parametrize("shards", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_train_as_one_process(ranks: RankPool, num_ranks: int, shards: str) -> None:
    settings = sharded({"shard": num_ranks, "shards": shards}, num_ranks)
    found = ranks.run(num_ranks, train, "gpt", settings, 20, DOUBLE)
    assert_alike(found, alone(DOUBLE), 1e-10)


def test_copies_of_shards_train_as_one_process(ranks: RankPool) -> None:
    for shards in ("optimizer", "gradients", "parameters"):
        settings = sharded({"shard": 2, "replicate": 2, "shards": shards}, 4)
        assert_alike(ranks.run(4, train, "gpt", settings, 20, DOUBLE), alone(DOUBLE), 1e-10)


def test_in_float32(ranks: RankPool) -> None:
    settings = sharded({"shard": 4}, 4)
    assert_alike(ranks.run(4, train, "gpt", settings, 20, SINGLE), alone(SINGLE), 1e-5)


def test_parameters_may_be_reduced_once_a_window(ranks: RankPool) -> None:
    settings = sharded({"shard": 2, "reduce": "window"}, 2)
    assert_alike(ranks.run(2, train, "gpt", settings, 20, DOUBLE), alone(DOUBLE), 1e-10)


def test_sgd_steps_shards_without_its_fused_kernel(ranks: RankPool) -> None:
    settings = sharded({"shard": 2}, 2, "sgd")
    found = ranks.run(2, train, "gpt", settings, 20, DOUBLE)
    assert_alike(found, alone(DOUBLE, "sgd"), 1e-10)


def test_with_recompute(ranks: RankPool) -> None:
    settings = {**sharded({"shard": 2}, 2), "memory": {"recompute": "blocks"}}
    assert_alike(ranks.run(2, train, "gpt", settings, 20, DOUBLE), alone(DOUBLE), 1e-10)
