"""Copies of weights are compared over ranks, and a slow rank is named with its phase."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.rank_pool import RankPool
from parallel.small_runs import assembled, settings_of
from surefoot.core.errors import RankError
from surefoot.parallel.health import RankHealth, RankTimes, checksums, refuse_differences, slow_rank


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 7).to(dtype)
    before = checksums([("w", weight)])
    assert before == checksums([("w", weight.clone())])
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    for bit in range(8 * weight.element_size()):
        flipped = weight.clone()
        flipped.view(-1).view(bits)[11] ^= torch.tensor(1, dtype=bits) << bit
        assert checksums([("w", flipped)]) != before


def test_the_odd_rank_and_the_weights_are_named() -> None:
    refuse_differences([{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}], 7)
    with pytest.raises(RankError) as caught:
        refuse_differences([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}], 7)
    assert "not equal: b" in caught.value.what
    assert caught.value.where == "after update 7; rank 2 against the others"


def test_parts_at_other_places_are_not_compared() -> None:
    refuse_differences([{"a at shard 0": 1}, {"a at shard 1": 2}], 7)


def test_the_slow_rank_is_named_with_its_phase() -> None:
    quick = RankTimes(10.0, {"data wait": 0.5, "forward": 3.0})
    assert slow_rank([quick, quick]) is None
    slow = RankTimes(10.0, {"data wait": 4.0, "forward": 3.2})
    text = slow_rank([quick, slow, quick])
    assert text is not None and text.startswith("rank 1 is slow") and text.endswith("data wait")
    assert "3.7 s more" in text
    slow = RankTimes(10.0, {"data wait": 0.5, "forward": 5.0})
    text = slow_rank([slow, quick])
    assert text is not None and text.startswith("rank 0 is slow") and text.endswith("forward")


def health_after_a_fault(axes: dict[str, Any], rank: int, name: str) -> tuple[bool, str]:
    """Trains two updates, changes one number on one rank, and compares."""
    assembly = assembled("gpt", settings_of(parallel=axes))
    place, trainable = assembly.place, assembly.trainable
    update = assembly.make_update()
    windows = assembly.open_windows(trainable.state.progress.cursor)
    for _ in range(2):
        update(next(windows))
    update.parts.log.settle()
    parameters = list(assembly.material.model.named_parameters())
    health = RankHealth(place.ranks, parameters, lambda: RankTimes(1.0, {}), print)
    health.check(2)
    held = dict(parameters)
    if place.ranks.rank == rank and name in held:
        part = held[name]
        local = part.to_local() if hasattr(part, "to_local") else part
        with torch.no_grad():
            local.view(-1)[0] += 1e-12
    try:
        health.check(2)
    except RankError as error:
        return False, error.what + error.where
    finally:
        assembly.close()
    return True, ""


@pytest.mark.parametrize(
    ("size", "axes"),
    [
        (2, {"replicate": 2}),
        pytest.param(4, {"replicate": 2, "shard": 2}, marks=pytest.mark.ranks_full),
        pytest.param(4, {"replicate": 2, "tensor": 2}, marks=pytest.mark.ranks_full),
        pytest.param(4, {"pipeline": 2, "replicate": 2}, marks=pytest.mark.ranks_full),
    ],
)
def test_a_number_changed_on_one_rank_is_found(
    ranks: RankPool, size: int, axes: dict[str, int]
) -> None:
    told = ranks.run(size, health_after_a_fault, axes, size - 1, "norm.weight")
    assert not any(equal for equal, _ in told)
    assert all("norm.weight" in text and "after update 2" in text for _, text in told)


def test_shards_are_held_once(ranks: RankPool) -> None:
    told = ranks.run(2, health_after_a_fault, {"shard": 2}, 1, "norm.weight")
    assert all(equal for equal, _ in told)
