"""Sample orders: weighted, by length, curriculum, and an adapter for torch's samplers.

Each is a pure function of (seed, epoch, position): a resume continues at any position, and all
ranks see one order. A sampler of a recipe is a function from the source to a `SampleOrder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from surefoot.core.errors import DataError, RequestError
from surefoot.core.targets import call, import_target
from surefoot.data.augment import preserved_cpu_rng, seed_for_sample
from surefoot.data.order import (
    IN_ORDER,
    SHUFFLED,
    IndexArray,
    InOrder,
    SampleOrder,
    Shuffled,
    keyed_hash,
    permuted_indices,
    uniform_numbers,
)

Numbers = npt.NDArray[np.float64]
_PURPOSE_GROUPS = 5
_PURPOSE_STAGE = 6
_PURPOSE_TORCH = 7
OF_CLASSES = "of-classes"
OF_SAMPLES = "of-samples"


def shuffled(source: Any) -> Shuffled:
    """A different permutation of the samples for each epoch."""
    return SHUFFLED


def in_order(source: Any) -> InOrder:
    """The order of the dataset, in every epoch."""
    return IN_ORDER


@dataclass(frozen=True, eq=False)
class Weighted(SampleOrder):
    """Draws with replacement, in proportion to the weights of the samples.

    Args:
        cumulative: float64 [num_samples], running sum of the weights.
        length: draws of one epoch.
    """

    cumulative: Numbers
    length: int

    @classmethod
    def of(cls, weights: npt.ArrayLike, length: int | None = None) -> Weighted:
        """The order of these weights [num_samples]; an epoch of as many draws if not said.

        Raises:
            DataError: a weight is negative or not finite, or all are 0.

        >>> order = Weighted.of([0.0, 1.0, 3.0])
        >>> drawn = order.indices(0, 0, np.arange(10_000), 3)
        >>> np.bincount(drawn, minlength=3).tolist()
        [0, 2555, 7445]
        """
        given = np.asarray(weights, dtype=np.float64).reshape(-1)
        if not (np.isfinite(given).all() and (given >= 0).all() and given.sum() > 0):
            raise DataError(
                "the weights cannot be drawn from",
                where="sampler",
                rule="weights are finite and not negative, and one is above 0",
            )
        return cls(np.cumsum(given), given.size if length is None else length)

    def epoch_length(self, num_samples: int) -> int:
        _check_size("weights", self.cumulative.size, num_samples)
        return self.length

    def indices(self, seed: int, epoch: int, positions: IndexArray, num_samples: int) -> IndexArray:
        drawn = uniform_numbers(seed, epoch, positions) * self.cumulative[-1]
        found: IndexArray = np.searchsorted(self.cumulative, drawn, side="right").astype(np.int64)
        return found


def weighted(source: Any, *, weights: str = OF_CLASSES, length: int | None = None) -> Weighted:
    """Draws samples by weight.

    Args:
        source: the training set.
        weights: `of-classes` draws every class as often (the class is a sample's second part), or
            `package.module:function`, which is called with the source and gives a weight a sample.
        length: draws of one epoch; as many as there are samples if not said.
    """
    if weights != OF_CLASSES:
        return Weighted.of(call_with(weights, source, "sampler.arguments.weights"), length)
    labels = [int(source[index][1]) for index in range(len(source))]
    counts = np.bincount(labels)
    return Weighted.of([1.0 / counts[label] for label in labels], length)


@dataclass(frozen=True, eq=False)
class ByLength(SampleOrder):
    """Samples of similar length together, to reduce padding; groups in random order.

    The shuffled order is divided into pools; each pool is sorted by length and divided into groups,
    and the groups of a pool are shuffled. So batches differ between epochs.

    Args:
        lengths: [num_samples].
        group: size of a group, such as that of a micro-batch.
        pool: number of groups of a pool.

    Raises:
        RequestError: a group or pool is empty.
    """

    lengths: IndexArray
    group: int
    pool: int = 64

    def __post_init__(self) -> None:
        if self.group < 1 or self.pool < 1:
            raise RequestError(
                f"groups of {self.group} samples, pools of {self.pool} groups",
                where="sampler.arguments",
                rule="both are at least 1",
            )

    def epoch_length(self, num_samples: int) -> int:
        _check_size("lengths", self.lengths.size, num_samples)
        return num_samples

    def indices(self, seed: int, epoch: int, positions: IndexArray, num_samples: int) -> IndexArray:
        size = self.group * self.pool
        found = np.empty_like(positions)
        for number in np.unique(positions // size).tolist():
            inside = positions // size == number
            block = self._block(seed, epoch, number, num_samples)
            found[inside] = block[positions[inside] - number * size]
        return found

    def _block(self, seed: int, epoch: int, number: int, num_samples: int) -> IndexArray:
        size = self.group * self.pool
        places = np.arange(number * size, min((number + 1) * size, num_samples), dtype=np.int64)
        block = permuted_indices(seed, epoch, places, num_samples)
        block = block[np.argsort(self.lengths[block], kind="stable")]
        whole = block.size // self.group
        if whole < 2:
            return block
        key = keyed_hash(seed, _PURPOSE_GROUPS, epoch, number)
        turned = permuted_indices(key, 0, np.arange(whole), whole)
        groups = block[: whole * self.group].reshape(whole, self.group)[turned]
        # A short last group stays last, where the plan expects it.
        return np.concatenate([groups.reshape(-1), block[whole * self.group :]])


def by_length(source: Any, *, group: int, lengths: str = OF_SAMPLES, pool: int = 64) -> ByLength:
    """Samples of similar length together.

    Args:
        source: the training set.
        group: samples of one group; that of `train.micro_batch`.
        lengths: `of-samples` reads every sample once for the length of its `input_ids`, of its
            first part, or its own; or `package.module:function`, called with the source.
        pool: groups that are sorted together.
    """
    found = (
        [_length_of(source[index]) for index in range(len(source))]
        if lengths == OF_SAMPLES
        else call_with(lengths, source, "sampler.arguments.lengths")
    )
    return ByLength(np.asarray(found, dtype=np.int64), group, pool)


@dataclass(frozen=True, eq=False)
class Curriculum(SampleOrder):
    """The easiest samples first; each epoch uses more of them, until all are used.

    An epoch has as many positions as the dataset has samples; as long as fewer are used, each
    comes several times. Epoch e (from 0) uses the easiest `start + (1 - start) e / epochs` of them.

    Args:
        easiest_first: int64 [num_samples], indices.
        start: share of the samples in the first epoch, in (0, 1].
        epochs: epochs until all are there, at least 1.

    Raises:
        RequestError: a number is out of its range.
    """

    easiest_first: IndexArray
    start: float = 0.25
    epochs: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.start <= 1 or self.epochs < 1:
            raise RequestError(
                f"the curriculum starts at {self.start} and takes {self.epochs} epochs",
                where="sampler.arguments",
                rule="0 < start <= 1, epochs >= 1",
            )

    def num_used(self, epoch: int, num_samples: int) -> int:
        """Samples of that epoch.

        >>> order = Curriculum(np.arange(100), start=0.5, epochs=2)
        >>> [order.num_used(epoch, 100) for epoch in range(4)]
        [50, 75, 100, 100]
        """
        share = min(1.0, self.start + (1 - self.start) * epoch / self.epochs)
        return max(1, round(share * num_samples))

    def epoch_length(self, num_samples: int) -> int:
        _check_size("difficulties", self.easiest_first.size, num_samples)
        return num_samples

    def indices(self, seed: int, epoch: int, positions: IndexArray, num_samples: int) -> IndexArray:
        used = self.num_used(epoch, num_samples)
        rounds, places = np.divmod(positions, used)
        found = np.empty_like(positions)
        for number in np.unique(rounds).tolist():
            key = keyed_hash(seed, _PURPOSE_STAGE, number)
            inside = rounds == number
            found[inside] = permuted_indices(key, epoch, places[inside], used)
        return self.easiest_first[found]


def curriculum(source: Any, *, difficulty: str, start: float = 0.25, epochs: int = 4) -> Curriculum:
    """The easiest samples first.

    Args:
        source: the training set.
        difficulty: `package.module:function`, called with the source; a number a sample.
        start: share of the samples in the first epoch.
        epochs: epochs until all are there.
    """
    found = call_with(difficulty, source, "sampler.arguments.difficulty")
    return Curriculum(np.argsort(np.asarray(found), kind="stable"), start, epochs)


class TorchOrder(SampleOrder):
    """A torch sampler: its order of each epoch, computed at once from a separate seed.

    It is iterated once per epoch, with every generator seeded by (seed, epoch), and stored: O(n)
    memory. `set_epoch` is called first if it exists.

    Args:
        sampler: gives indices, and knows its length.

    Raises:
        RequestError: it gives batches, splits the data itself, or does not know its length.
    """

    promise = (
        "a torch sampler's, seeded by (seed, epoch) and made an epoch at a time; a sampler that "
        "remembers earlier epochs is not resumed exactly"
    )

    def __init__(self, sampler: Any) -> None:
        name = type(sampler).__name__
        why = ""
        if isinstance(sampler, BatchSampler):
            why = "gives batches: give its sampler, and train.micro_batch"
        elif isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            why = "splits the data itself: the ranks of a run share one order"
        elif not hasattr(sampler, "__len__"):
            why = "does not know its length"
        if why:
            raise RequestError(
                f"the sampler {name} {why}",
                where="sampler",
                rule="a sampler gives the index of one sample at a time, so many an epoch",
            )
        self._sampler = sampler
        self._made: tuple[int, int, IndexArray] | None = None
        if not np.array_equal(self._epoch(0, 0), self._epoch(0, 0)):
            raise RequestError(
                f"the sampler {name} gives another order from the same seed",
                where="sampler",
                rule="the order of an epoch follows from the seed, so that a run can be resumed",
                remedy="draw from torch's, NumPy's or Python's generator, or from its `generator`",
            )

    def epoch_length(self, num_samples: int) -> int:
        return len(self._sampler)

    def indices(self, seed: int, epoch: int, positions: IndexArray, num_samples: int) -> IndexArray:
        if self._made is None or self._made[:2] != (seed, epoch):
            self._made = (seed, epoch, self._epoch(seed, epoch))
        order = self._made[2]
        if order.size != len(self._sampler):
            raise DataError(
                f"the sampler {type(self._sampler).__name__} gave {order.size} indices",
                where=f"sampler, epoch {epoch}",
                rule=f"its length is {len(self._sampler)}",
            )
        return order[positions]

    def _epoch(self, seed: int, epoch: int) -> IndexArray:
        key = keyed_hash(seed, _PURPOSE_TORCH, epoch)
        generator = getattr(self._sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key >> 1)
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)
        with preserved_cpu_rng():
            seed_for_sample(key, epoch, 0)
            return np.fromiter((int(index) for index in self._sampler), dtype=np.int64)


def as_order(given: Any, source: Any) -> SampleOrder:
    """The order that a user passes.

    Args:
        given: a `SampleOrder`, a torch `Sampler`, or a class or function from the source to one.
        source: the training set.

    Raises:
        RequestError: it is none of these.
    """
    made = given(source) if callable(given) and not isinstance(given, Sampler) else given
    if isinstance(made, SampleOrder):
        return made
    if isinstance(made, Sampler):
        return TorchOrder(made)
    raise RequestError(
        f"the sampler is a {type(made).__name__}",
        where="sampler",
        rule="a sampler is a SampleOrder, a torch Sampler, or a function from the data to one",
        remedy="write a class with indices(seed, epoch, positions, num_samples)",
    )


def call_with(target: str, source: Any, where: str) -> Any:
    """Calls the user's `package.module:function` with the source."""
    return call(import_target(target, where), (source,), {}, target, where)


def _length_of(sample: Any) -> int:
    if isinstance(sample, Mapping):
        return len(sample["input_ids"])
    return len(sample[0]) if isinstance(sample, tuple | list) else len(sample)


def _check_size(what: str, given: int, num_samples: int) -> None:
    if given != num_samples:
        raise DataError(
            f"there are {given} {what} for {num_samples} samples",
            where="sampler",
            rule="one for each sample of the training set",
        )
