"""Sharded models train as one process does, whatever is cut and when."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from parallel.checks import assert_alike
from parallel.rank_pool import RankPool
from parallel.small_runs import Seen, assembled, settings_of, train
from surefoot.data.order import Cursor
from surefoot.parallel.parts import local_part

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
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.ranks_full), 4])
def test_shards_train_as_one_process(ranks: RankPool, num_ranks: int, shards: str) -> None:
    settings = sharded({"shard": num_ranks, "shards": shards}, num_ranks)
    found = ranks.run(num_ranks, train, "gpt", settings, 20, DOUBLE)
    assert_alike(found, alone(DOUBLE), 1e-10)


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param("optimizer", marks=pytest.mark.ranks_full),
        pytest.param("gradients", marks=pytest.mark.ranks_full),
        "parameters",
    ],
)
def test_copies_of_shards_train_as_one_process(ranks: RankPool, shards: str) -> None:
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


@pytest.mark.parametrize(
    "memory",
    [
        {"recompute": "blocks"},
        pytest.param({"recompute": "budget"}, marks=pytest.mark.ranks_full),
        pytest.param({"offload_activations": "cpu"}, marks=pytest.mark.ranks_full),
        pytest.param({"loss": "chunked", "loss_chunk": 3}, marks=pytest.mark.ranks_full),
    ],
    ids=["recompute", "budget", "offload", "chunked"],
)
def test_with_less_memory(ranks: RankPool, memory: dict[str, Any]) -> None:
    settings = {**sharded({"shard": 2}, 2), "memory": memory}
    assert_alike(ranks.run(2, train, "gpt", settings, 20, DOUBLE), alone(DOUBLE), 1e-10)


def held_bytes(parallel: dict[str, Any]) -> tuple[int, int]:
    """Bytes of parameters and of optimizer state on this rank, after an update."""
    assembly = assembled("gpt", settings_of(4 if parallel else 1, parallel=parallel))
    trainable, update = assembly.trainable, assembly.make_update()
    with closing(assembly.open_windows(Cursor())) as windows:
        update(next(windows))
        update.parts.log.settle()
    assembly.close()

    def size(tensors: Iterable[torch.Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in map(local_part, tensors))

    state = trainable.optimizing.optimizer.optimizer.state.values()
    moments = [s[key] for s in state for key in ("exp_avg", "exp_avg_sq")]
    return size(trainable.state.model.parameters()), size(moments)


def test_each_rank_holds_its_part(ranks: RankPool) -> None:
    parameters, moments = held_bytes({})
    for shards in ("optimizer", "gradients", "parameters"):
        held = ranks.run(4, held_bytes, {"shard": 4, "shards": shards})
        # Every dim is a multiple of four here.
        assert held == [(parameters // 4, moments // 4)] * 4


def gathered_in_time() -> list[bool]:
    """As each block begins, whether the parameters of the next are on their way or there."""
    assembly = assembled("gpt", settings_of(2, parallel={"shard": 2}), num_layers=4)
    update = assembly.make_update()
    blocks = list(assembly.trainable.state.model.blocks)  # type: ignore[arg-type]
    found: list[bool] = []
    for block, following in pairwise(blocks):

        def look(*_: Any, following: Any = following) -> None:
            group = following._get_fsdp_state()._fsdp_param_group
            found.append(group._all_gather_result is not None or group.is_unsharded)

        block.feedforward.register_forward_pre_hook(look)
    with closing(assembly.open_windows(Cursor())) as windows:
        update(next(windows))
        update.parts.log.settle()
    assembly.close()
    return found


def test_parameters_are_gathered_ahead(ranks: RankPool) -> None:
    for found in ranks.run(2, gathered_in_time):
        assert found == [True] * 9
