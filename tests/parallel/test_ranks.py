"""Ranks meet in a store: all see all answers, and who is missing is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from surefoot.core.errors import RankError
from surefoot.parallel.ranks import OneRank, StoreRanks, any_of, from_first


def on_threads(size: int, work: Callable[[StoreRanks], Any], deadline: float = 20.0) -> list[Any]:
    """Runs `work` once for each rank; what it returns or raises, in the order of the ranks."""
    store = dist.HashStore()
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(StoreRanks(store, rank, size, deadline))
        except RankError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_one_rank_hears_itself() -> None:
    assert OneRank().gather("here", {"a": 1}) == [{"a": 1}]


def test_all_hear_all_in_order() -> None:
    def work(ranks: StoreRanks) -> list[list[int]]:
        return [ranks.gather(f"meeting {i}", 10 * i + ranks.rank) for i in range(5)]

    expected = [[10 * i + rank for rank in range(3)] for i in range(5)]
    assert on_threads(3, work) == [expected] * 3


def test_any_and_first() -> None:
    assert on_threads(3, lambda r: any_of(r, "stop", r.rank == 2)) == [True] * 3
    assert on_threads(3, lambda r: any_of(r, "stop", False)) == [False] * 3
    assert on_threads(3, lambda r: from_first(r, "seed", r.rank + 7)) == [7] * 3


def test_who_is_missing_is_named() -> None:
    def work(ranks: StoreRanks) -> Any:
        return ranks.gather("save", 1) if ranks.rank != 1 else "elsewhere"

    first, second, third = on_threads(3, work, deadline=0.3)
    assert second == "elsewhere"
    for error in (first, third):
        assert isinstance(error, RankError)
        assert "rank 1 did not answer" in error.what
        assert "save" in error.where


def test_ranks_at_different_places_are_refused() -> None:
    found = on_threads(2, lambda r: r.gather("save" if r.rank else "evaluate", 1))
    assert "rank 1 came to 'save', not to 'evaluate'" in found[0].what
    assert "rank 0 came to 'evaluate', not to 'save'" in found[1].what


def test_old_answers_are_cleared() -> None:
    store = dist.HashStore()
    ranks = StoreRanks(store, 0, 1)
    for i in range(50):
        ranks.gather(f"meeting {i}", i)
    assert store.num_keys() <= 3


@pytest.mark.parametrize("value", [None, [1, 2.5, "x"], {"k": [True]}])
def test_json_values_travel(value: Any) -> None:
    assert on_threads(2, lambda r: r.gather("value", value)) == [[value, value]] * 2
