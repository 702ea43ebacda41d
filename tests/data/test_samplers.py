"""Every order is a pure function of (seed, epoch, position): any cut of an epoch gives the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from surefoot.core.errors import DataError, RequestError
from surefoot.data.order import BatchPlan, Cursor, IndexArray, SampleOrder, order_digest
from surefoot.data.samplers import (
    ByLength,
    Curriculum,
    TorchOrder,
    Weighted,
    as_order,
    by_length,
    curriculum,
    in_order,
    shuffled,
    weighted,
)
from surefoot.data.sources.datasets import as_source

NUM_SAMPLES = 57
LENGTHS = (np.arange(NUM_SAMPLES) * 37) % 23 + 1
LABELS = [0] * 50 + [1] * 7
SOURCE = as_source([(torch.zeros(int(n)), label) for n, label in zip(LENGTHS, LABELS, strict=True)])
ORDERS: dict[str, Any] = {
    "shuffled": shuffled,
    "in order": in_order,
    "weighted": weighted,
    "more draws": lambda source: weighted(source, length=100),
    "by length": lambda source: by_length(source, group=4, pool=3),
    "curriculum": lambda source: Curriculum(np.argsort(LENGTHS), start=0.2, epochs=3),
    "torch random": lambda source: RandomSampler(source),
    "torch weighted": lambda source: WeightedRandomSampler([1.0] * NUM_SAMPLES, 70),
    "torch with a generator": lambda s: RandomSampler(s, generator=torch.Generator()),
}


def plan_of(name: str, **fields: Any) -> BatchPlan:
    order = as_order(ORDERS[name], SOURCE)
    return BatchPlan(NUM_SAMPLES, 4, seed=5, order=order, **fields)


def epochs(plan: BatchPlan, number: int) -> list[list[int]]:
    return [
        [i for batch in plan.one_epoch(Cursor(epoch, 0)) for i in batch.indices.tolist()]
        for epoch in range(number)
    ]


@pytest.mark.parametrize("name", ORDERS)
def test_any_position_is_resumed_with_the_same_samples(name: str) -> None:
    found = epochs(plan_of(name), 3)
    # A new plan, as a new process makes it, from its last position backwards.
    plan = plan_of(name)
    for epoch in (2, 0, 1):
        for position in range(len(found[epoch]) - 1, -1, -9):
            rest = [i for b in plan.one_epoch(Cursor(epoch, position)) for i in b.indices.tolist()]
            assert rest == found[epoch][position:]


@pytest.mark.parametrize("name", ORDERS)
def test_ranks_share_one_order(name: str) -> None:
    (alone,) = epochs(plan_of(name, window_length=2), 1)
    shares = [plan_of(name, rank=rank, num_ranks=2).one_epoch() for rank in range(2)]
    together = [i for both in zip(*shares, strict=True) for b in both for i in b.indices.tolist()]
    assert together == alone


@pytest.mark.parametrize("name", sorted(ORDERS.keys() - {"in order"}))
def test_another_seed_and_another_epoch_are_another_order(name: str) -> None:
    first, second = epochs(plan_of(name), 2)
    assert first != second
    other = BatchPlan(NUM_SAMPLES, 4, seed=6, order=as_order(ORDERS[name], SOURCE))
    assert epochs(other, 1)[0] != first
    assert order_digest(other) != order_digest(plan_of(name)) == order_digest(plan_of(name))


@pytest.mark.parametrize("name", ["shuffled", "in order", "by length", "torch random"])
def test_each_sample_comes_once_an_epoch(name: str) -> None:
    for epoch in epochs(plan_of(name), 3):
        assert sorted(epoch) == list(range(NUM_SAMPLES))


def test_an_epoch_is_as_long_as_its_order() -> None:
    plan = plan_of("more draws")
    assert (plan.epoch_length, plan.updates_per_epoch) == (100, 25)
    assert len(epochs(plan, 1)[0]) == 100
    assert plan_of("more draws", drop_short=True, window_length=3).samples_per_epoch == 96


def test_weights_are_followed() -> None:
    order = Weighted.of([1.0, 0.0, 2.0, 5.0], 8000)
    drawn = order.indices(3, 0, np.arange(8000), 4)
    counts = np.bincount(drawn, minlength=4)
    assert counts[1] == 0
    # Five standard deviations of a binomial count.
    for index, share in ((0, 1 / 8), (2, 2 / 8), (3, 5 / 8)):
        assert abs(counts[index] - 8000 * share) < 5 * (8000 * share * (1 - share)) ** 0.5


def test_classes_are_balanced() -> None:
    drawn = np.concatenate([weighted(SOURCE).indices(0, e, np.arange(57), 57) for e in range(50)])
    share = (drawn >= 50).mean()
    assert abs(share - 0.5) < 5 * (0.25 / drawn.size) ** 0.5


def test_lengths_are_alike_in_a_group_and_groups_are_mixed() -> None:
    order = ByLength(LENGTHS, group=4, pool=14)
    (epoch,) = epochs(BatchPlan(NUM_SAMPLES, 4, order=order), 1)
    groups = [LENGTHS[epoch[start : start + 4]] for start in range(0, 56, 4)]
    spread = max(int(group.max() - group.min()) for group in groups)
    assert spread <= 3
    means = [float(group.mean()) for group in groups]
    assert means != sorted(means)


def test_a_curriculum_begins_with_the_easiest() -> None:
    order = Curriculum(np.argsort(LENGTHS, kind="stable"), start=0.2, epochs=2)
    longest = [int(LENGTHS[found].max()) for found in epochs(BatchPlan(57, 4, order=order), 3)]
    assert longest[0] <= np.quantile(LENGTHS, 0.25) < longest[1] < longest[2] == LENGTHS.max()
    # The eleven easiest come five times, and two of them once more.
    counts = np.bincount(epochs(BatchPlan(57, 4, order=order), 1)[0], minlength=57)
    assert sorted(counts[counts > 0]) == [5] * 9 + [6] * 2


def difficulty(source: Any) -> Any:
    return LENGTHS


def test_a_recipe_names_a_function_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_numbers", sys.modules[__name__])
    order = curriculum(SOURCE, difficulty="own_numbers:difficulty")
    assert (order.easiest_first == np.argsort(LENGTHS, kind="stable")).all()
    with pytest.raises(RequestError, match="did you mean difficulty"):
        curriculum(SOURCE, difficulty="own_numbers:dificulty")
    assert (by_length(SOURCE, group=4).lengths == LENGTHS).all()


def test_torch_samplers_leave_the_global_generators_alone() -> None:
    before = torch.get_rng_state()
    TorchOrder(RandomSampler(SOURCE)).indices(0, 3, np.arange(4), NUM_SAMPLES)
    assert torch.equal(torch.get_rng_state(), before)


class Growing(Sampler[int]):
    """Remembers how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter([(self.asked + n) % 5 for n in range(5)])


class TooFar(SampleOrder):
    """Gives an index that is not there."""

    def indices(self, seed: int, epoch: int, positions: IndexArray, num_samples: int) -> IndexArray:
        return positions + 1


class Halves(TooFar):
    """Gives numbers that are no indices."""

    def indices(self, seed: int, epoch: int, positions: Any, num_samples: int) -> Any:
        return positions / 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Growing(), "another order from the same seed"),
        (BatchSampler(SequentialSampler(SOURCE), 2, False), "train.micro_batch"),
        (3, "the sampler is a int"),
        (lambda source: None, "the sampler is a NoneType"),
    ],
)
def test_what_cannot_be_resumed_is_refused(given: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        as_order(given, SOURCE)


@pytest.mark.parametrize("order", [TooFar(), Halves()])
def test_what_is_no_index_is_refused(order: SampleOrder) -> None:
    with pytest.raises(DataError, match=f"the order {type(order).__name__} gave"):
        list(BatchPlan(NUM_SAMPLES, 4, order=order).one_epoch())


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: Weighted.of([1.0, -1.0]), DataError),
        (lambda: Weighted.of([0.0, 0.0]), DataError),
        (lambda: BatchPlan(57, 4, order=Weighted.of([1.0] * 56)), DataError),
        (lambda: ByLength(LENGTHS, group=0), RequestError),
        (lambda: Curriculum(np.arange(57), start=0.0), RequestError),
    ],
)
def test_numbers_that_fit_no_order_are_refused(make: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        make()
