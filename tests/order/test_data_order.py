"""The order of the data: pinned numbers, a true permutation, fair, and the same for any layout."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError, RequestError
from surefoot.data.order import (
    IN_ORDER,
    SHUFFLED,
    BatchPlan,
    Cursor,
    PlannedBatch,
    keyed_hash,
    permuted_index,
    permuted_indices,
    sample_seed,
)

SEEDS = st.integers(0, 2**64 - 1)
GOLDEN_TEN = [3, 5, 7, 8, 0, 1, 9, 2, 4, 6]
GOLDEN_MANY = [614155, 314848, 800595, 786703, 222291]
GOLDEN_HUGE = [1026478834651, 698141676631, 429728818935]
GOLDEN_SEEDS = [14850480464321812899, 5564433577857138135]


def take(plan: BatchPlan, count: int, cursor: Cursor | None = None) -> list[PlannedBatch]:
    return list(itertools.islice(plan.micro_batches(cursor or Cursor()), count))


def outline(batch: PlannedBatch) -> tuple[object, ...]:
    return (batch.keys, batch.cursor_after, batch.ends_window, batch.ends_epoch)


def test_numbers_are_pinned() -> None:
    # These never change: a stored run continues in this order.
    assert permuted_indices(0, 0, np.arange(10), 10).tolist() == GOLDEN_TEN
    assert permuted_indices(1234, 7, np.arange(5), 1_000_003).tolist() == GOLDEN_MANY
    assert permuted_indices(2**64 - 1, 0, [0, 1, 2**40 - 1], 2**40).tolist() == GOLDEN_HUGE
    assert sample_seed(0, 0, 0) == GOLDEN_SEEDS[0]
    assert sample_seed(1234, 7, 123_456) == GOLDEN_SEEDS[1]
    assert keyed_hash() == 0


def test_mixing_is_splitmix64() -> None:
    # First outputs of SplitMix64 from state 0, as published with the generator.
    assert keyed_hash(0) == 0xE220A8397B1DCDAF


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 3000))
@settings(max_examples=150, deadline=None)
def test_every_sample_comes_once(seed: int, epoch: int, num_samples: int) -> None:
    order = permuted_indices(seed, epoch, np.arange(num_samples), num_samples)
    assert order.dtype == np.int64
    assert (np.sort(order) == np.arange(num_samples)).all()


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 2**61), st.data())
@settings(max_examples=100, deadline=None)
def test_one_and_many_agree(seed: int, epoch: int, num_samples: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=8))
    many = permuted_indices(seed, epoch, positions, num_samples).tolist()
    assert many == [permuted_index(seed, epoch, place, num_samples) for place in positions]
    assert all(0 <= index < num_samples for index in many)


def test_a_million_positions_are_a_permutation() -> None:
    order = permuted_indices(3, 1, np.arange(1_000_000).reshape(1000, 1000), 1_000_000)
    assert order.shape == (1000, 1000)
    assert (np.bincount(order.ravel(), minlength=1_000_000) == 1).all()


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_every_order_of_few_samples_is_equally_likely(num_samples: int) -> None:
    possible = math.factorial(num_samples)
    each = 40
    trials = each * possible
    found = Counter(
        tuple(permuted_indices(seed, 0, np.arange(num_samples), num_samples).tolist())
        for seed in range(trials)
    )
    chi_square = sum((count - each) ** 2 / each for count in found.values())
    chi_square += each * (possible - len(found))
    # Mean and variance of chi square are its degrees of freedom and twice that; five sigma.
    freedom = possible - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("num_samples", [7, 64, 100])
def test_neighbours_go_anywhere(num_samples: int) -> None:
    epochs = 40 * num_samples
    pairs = np.array([permuted_indices(5, e, [0, 1], num_samples) for e in range(epochs)])
    for column in (pairs[:, 0], pairs[:, 1], (pairs[:, 1] - pairs[:, 0]) % num_samples - 1):
        counts = np.bincount(column).astype(float)
        expected = epochs / len(counts)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        freedom = len(counts) - 1
        assert len(counts) >= num_samples - 1
        assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_position_and_index_are_not_correlated() -> None:
    num_samples = 50_000
    order = permuted_indices(11, 0, np.arange(num_samples), num_samples)
    # The correlation of a random permutation has standard deviation 1 / sqrt(n).
    assert abs(np.corrcoef(np.arange(num_samples), order)[0, 1]) < 5 / math.sqrt(num_samples)
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / math.sqrt(num_samples)


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(permuted_indices(seed, epoch, np.arange(100), 100).tolist())
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 100


def test_seeds_of_samples_differ() -> None:
    seeds = {sample_seed(s, e, i) for s in range(10) for e in range(10) for i in range(100)}
    assert len(seeds) == 10_000


@pytest.mark.parametrize(
    ("seed", "epoch", "position", "num_samples"),
    [(-1, 0, 0, 5), (2**64, 0, 0, 5), (0, -1, 0, 5), (0, 0, 5, 5), (0, 0, -1, 5), (0, 0, 0, 0)],
)
def test_impossible_positions_are_refused(
    seed: int, epoch: int, position: int, num_samples: int
) -> None:
    with pytest.raises((DataError, RequestError)):
        permuted_index(seed, epoch, position, num_samples)
    with pytest.raises((DataError, RequestError)):
        permuted_indices(seed, epoch, [position], num_samples)


def test_an_epoch_covers_the_dataset_and_windows_stay_inside() -> None:
    plan = BatchPlan(23, micro_batch=3, window_length=2, seed=1)
    epoch = list(plan.one_epoch())
    assert [len(batch.indices) for batch in epoch] == [3] * 7 + [2]
    assert [batch.ends_window for batch in epoch] == [False, True] * 4
    assert [batch.ends_epoch for batch in epoch] == [False] * 7 + [True]
    assert epoch[-1].cursor_after == Cursor(1, 0)
    assert sorted(index for batch in epoch for _, index in batch.keys) == list(range(23))
    assert plan.updates_per_epoch == 4
    assert plan.samples_per_window == 6
    following = take(plan, 9)[-1]
    assert following.epoch == 1 and following.cursor_after == Cursor(1, 3)


def test_order_without_shuffle_is_that_of_the_dataset() -> None:
    plan = BatchPlan(7, micro_batch=3, order=IN_ORDER)
    assert [batch.indices.tolist() for batch in take(plan, 4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
        [0, 1, 2],
    ]


def test_short_windows_can_be_dropped() -> None:
    plan = BatchPlan(23, micro_batch=3, window_length=2, seed=1, drop_short=True)
    assert plan.samples_per_epoch == 18 and plan.updates_per_epoch == 3
    epoch = list(plan.one_epoch())
    assert [len(batch.indices) for batch in epoch] == [3] * 6
    assert epoch[-1].ends_epoch and epoch[-1].cursor_after == Cursor(1, 0)
    # A cursor in the part that is left out, as from a run that kept it, goes on with the next one.
    assert take(plan, 1, Cursor(0, 20))[0].epoch == 1
    with pytest.raises(RequestError, match="no full window"):
        BatchPlan(5, micro_batch=3, window_length=2, drop_short=True)


@given(
    num_samples=st.integers(1, 60),
    micro_batch=st.integers(1, 7),
    window_length=st.integers(1, 4),
    num_ranks=st.integers(1, 3),
    drop_short=st.booleans(),
    stop=st.integers(0, 80),
)
@settings(max_examples=150, deadline=None)
def test_any_cursor_continues_the_same_order(
    num_samples: int,
    micro_batch: int,
    window_length: int,
    num_ranks: int,
    drop_short: bool,
    stop: int,
) -> None:
    drop_short &= num_samples >= micro_batch * window_length * num_ranks
    for rank in range(num_ranks):
        plan = BatchPlan(
            num_samples, micro_batch, window_length, 9, SHUFFLED, drop_short, rank, num_ranks
        )
        whole = take(plan, stop + 20)
        cursor = whole[stop].cursor_after
        assert Cursor.from_json(cursor.as_json()) == cursor
        rest = take(plan, 19, cursor)
        assert [outline(b) for b in rest] == [outline(b) for b in whole[stop + 1 :]]


@given(
    num_samples=st.integers(1, 90),
    micro_batch=st.integers(1, 5),
    layouts=st.sampled_from([((1, 6), (2, 3), (3, 2), (6, 1)), ((1, 4), (2, 2), (4, 1))]),
)
@settings(max_examples=100, deadline=None)
def test_ranks_share_the_same_windows(
    num_samples: int, micro_batch: int, layouts: tuple[tuple[int, int], ...]
) -> None:
    def windows(num_ranks: int, window_length: int) -> list[list[tuple[int, ...]]]:
        ranks = [
            list(
                BatchPlan(
                    num_samples, micro_batch, window_length, 4, SHUFFLED, False, rank, num_ranks
                ).one_epoch()
            )
            for rank in range(num_ranks)
        ]
        assert len({len(batches) for batches in ranks}) == 1, "every rank runs as many passes"
        out: list[list[tuple[int, ...]]] = [[]]
        for together in zip(*ranks, strict=True):
            assert len({(b.cursor_after, b.ends_window, b.ends_epoch) for b in together}) == 1
            # Each micro-batch in the order of the single-rank layout, empty fillers left out.
            out[-1] += [tuple(b.indices.tolist()) for b in together if b.indices.size]
            for batch in together:
                assert batch.indices.size == 0 or batch.filler == batch.indices[0]
            if together[0].ends_window:
                out.append([])
        return out

    first = windows(*layouts[0])
    assert sorted(i for window in first for batch in window for i in batch) == list(
        range(num_samples)
    )
    for layout in layouts[1:]:
        assert windows(*layout) == first


def test_a_rank_without_data_gets_a_filler_of_the_same_window() -> None:
    plans = [BatchPlan(5, 2, 1, 3, SHUFFLED, False, rank, 4) for rank in range(4)]
    batches = [next(plan.micro_batches()) for plan in plans]
    assert [len(batch.indices) for batch in batches] == [2, 2, 1, 0]
    assert batches[3].keys == ()
    assert batches[3].filler == batches[0].indices[0]


def test_a_new_batch_size_first_completes_the_window_it_falls_into() -> None:
    plan = BatchPlan(48, micro_batch=8, window_length=2, seed=2)
    resumed = take(plan, 3, Cursor(0, 20))
    assert [len(batch.indices) for batch in resumed] == [4, 8, 8]
    assert [batch.ends_window for batch in resumed] == [False, True, False]


def test_changing_the_indices_of_a_batch_changes_no_other() -> None:
    plan = BatchPlan(10, micro_batch=5, seed=2)
    expected = [batch.keys for batch in plan.one_epoch()]
    found = []
    for batch in plan.one_epoch():
        found.append(batch.keys)
        batch.indices[:] = 0
    assert found == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_samples": 0},
        {"micro_batch": 0},
        {"window_length": 0},
        {"num_ranks": 0},
        {"rank": 1},
        {"rank": -1},
        {"seed": -1},
    ],
)
def test_an_impossible_plan_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises((RequestError, DataError)):
        BatchPlan(**{"num_samples": 10, "micro_batch": 2, **arguments})


@pytest.mark.parametrize("cursor", [Cursor(0, 11), Cursor(0, -1), Cursor(-1, 0)])
def test_a_cursor_of_another_dataset_is_refused(cursor: Cursor) -> None:
    with pytest.raises(DataError, match="cannot continue"):
        next(BatchPlan(10, 2).micro_batches(cursor))
