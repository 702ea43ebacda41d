"""What ranks agree on before and during a run: the same run, the mesh, how often they reduce."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.rank_pool import CaseFailed, RankPool
from parallel.small_runs import assembled, settings_of
from surefoot.config.sections import ParallelSection
from surefoot.core.errors import RankError, RequestError
from surefoot.data.order import Cursor
from surefoot.parallel.mesh import AXES, COSTS, MeshSizes, resolve_sizes
from surefoot.parallel.ranks import world_ranks
from surefoot.run.rank_agreement import refuse_differences


class CountingCollectives(TorchDispatchMode):
    """Counts collectives of more than a few elements: those of parameters and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            self.seen.append(name.split(".")[1])
        return func(*args, **(kwargs or {}))


def collectives_of_a_window(parallel: dict[str, Any]) -> list[str]:
    """Collectives of the second window, of three micro-batches."""
    assembly = assembled("gpt", settings_of(dist.get_world_size(), parallel=parallel))
    update = assembly.make_update()
    with closing(assembly.open_windows(Cursor())) as windows:
        update(next(windows))
        window = next(windows)
        assert len(window.micro_batches) == 3
        counting = CountingCollectives()
        hooked: list[str] = []
        original = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() > 100:  # More than what the host tells.
                hooked.append("gradients")
            return original(tensor, *args, **kwargs)

        dist.all_reduce = all_reduce  # type: ignore[assignment]
        try:
            with counting:
                update(window)
        finally:
            dist.all_reduce = original
    assembly.close()
    return [*counting.seen, *hooked]


def test_gradients_are_reduced_once_a_window(ranks: RankPool) -> None:
    for seen in ranks.run(2, collectives_of_a_window, {}):
        assert seen.count("gradients") == 1


def count_scatters(parallel: dict[str, Any]) -> int:
    seen = collectives_of_a_window(parallel)
    return sum("reduce_scatter" in name for name in seen)


def test_shards_are_reduced_as_their_kind_needs(ranks: RankPool) -> None:
    once = ranks.run(2, count_scatters, {"shard": 2, "shards": "optimizer"})
    each = ranks.run(2, count_scatters, {"shard": 2, "shards": "gradients"})
    window = ranks.run(2, count_scatters, {"shard": 2, "reduce": "window"})
    # Two blocks and the rest: three groups of parameters.
    assert (once, each, window) == ([3, 3], [9, 9], [3, 3])


def differing(rank_of_other: int) -> None:
    rank = dist.get_rank()
    refuse_differences(
        world_ranks(20.0),
        {"torch": "2", "config optimizer.lr": "0.1" if rank != rank_of_other else "0.2"},
    )


def test_ranks_with_another_configuration_are_named(ranks: RankPool) -> None:
    with pytest.raises(CaseFailed) as failed:
        ranks.run(3, differing, 2)
    assert isinstance(failed.value.error, RankError)
    assert "config optimizer.lr: 0.1 on rank 0, 0.2 on rank 2" in str(failed.value.error)
    ranks.run(3, differing, 9)


def statistics_after_a_filler() -> tuple[list[tuple[bool, int]], list[float], float]:
    """Four samples of 36 are left for eight: rank 1 of two runs a filler."""
    settings = settings_of(1)
    settings["train"] |= {"micro_batch": 4, "accumulation": 1}
    assembly = assembled("pictures", settings)
    update = assembly.make_update()
    (norm,) = [m for m in assembly.material.model.modules() if isinstance(m, nn.BatchNorm1d)]
    seen: list[tuple[bool, int]] = []
    norm.register_forward_hook(lambda m, inputs, _: seen.append((m.training, len(inputs[0]))))
    assert assembly.plan.num_samples == 36
    with closing(assembly.open_windows(Cursor(0, 24))) as windows:
        update(next(windows))
        update(next(windows))
        update.parts.log.settle()
    assembly.close()
    assert norm.training
    return seen, norm.running_mean.tolist(), float(norm.num_batches_tracked)  # type: ignore


def test_a_filler_touches_no_statistics_and_all_ranks_keep_the_same(ranks: RankPool) -> None:
    first, second = ranks.run(2, statistics_after_a_filler)
    assert first[0] == [(True, 4), (True, 4)]
    assert second[0] == [(True, 4), (False, 1)]
    assert first[1:] == second[1:] and first[2] == 2


@pytest.mark.parametrize(
    ("asked", "num_ranks", "sizes"),
    [
        ({}, 4, {"replicate": 4}),
        ({"shard": "auto"}, 4, {"shard": 4}),
        ({"shard": 2}, 4, {"replicate": 2, "shard": 2}),
        ({"shard": 2, "replicate": 2}, 4, {"replicate": 2, "shard": 2}),
        ({"tensor": 2, "shard": "auto"}, 8, {"tensor": 2, "shard": 4}),
    ],
)
def test_one_size_is_filled_in(asked: dict[str, Any], num_ranks: int, sizes: Any) -> None:
    assert resolve_sizes(ParallelSection(**asked), num_ranks) == MeshSizes(**sizes)


@pytest.mark.parametrize(
    ("asked", "num_ranks", "what", "remedy"),
    [
        (
            {"shard": 3},
            4,
            "does not make 4 ranks",
            "use parallel.shard=2, or start a multiple of 3",
        ),
        ({"shard": 2}, 1, "does not make 1 rank", "use parallel.shard=1, or start a multiple of 2"),
        ({"replicate": 2, "tensor": 4}, 4, "replicate 2 x tensor 4", "parallel.replicate=1"),
        ({"replicate": 2}, 4, "does not make 4 ranks", "parallel.replicate=4"),
        ({"shard": "auto", "tensor": "auto"}, 4, "are all auto", "set a size"),
    ],
)
def test_a_mesh_that_does_not_fit(asked: Any, num_ranks: int, what: str, remedy: str) -> None:
    with pytest.raises(RequestError) as refused:
        resolve_sizes(ParallelSection(**asked), num_ranks)
    assert what in str(refused.value) and remedy in str(refused.value)


def test_each_rank_has_one_place() -> None:
    sizes = MeshSizes(pipeline=2, replicate=2, shard=3, tensor=2)
    places = [tuple(sizes.coordinates(rank).values()) for rank in range(sizes.num_ranks)]
    assert len(set(places)) == sizes.num_ranks == 24
    data = [sizes.data_rank(rank) for rank in range(24)]
    assert sorted(set(data)) == list(range(6)) and all(data.count(d) == 4 for d in range(6))
    assert sum(sizes.leads(rank) for rank in range(24)) == sizes.data_parallel == 6
    assert [row.axis for row in sizes.table()] == ["pipeline", "replicate", "shard", "tensor"]
    assert COSTS.keys() == set(AXES)


def sharded_state() -> tuple[bool, bool]:
    assembly = assembled("gpt", settings_of(2, parallel={"shard": 2}))
    state = assembly.trainable.state
    names = set(state.model.state_dict())
    assembly.close()
    kept = state.optimizer.state_by_name()["shapes"]
    sharded = all(isinstance(p, DTensor) for p in state.model.parameters())
    return sharded, names >= set(kept)


def test_names_carry_no_prefix(ranks: RankPool) -> None:
    assert ranks.run(2, sharded_state) == [(True, True)] * 2
