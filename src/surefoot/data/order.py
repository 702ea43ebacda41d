"""The order of the data as a pure function of (seed, epoch, position).

Defines the samples of each micro-batch and window. Holds no list of the epoch, draws from no random
stream and loads no sample, so a run resumes at any position at once, with any number of workers
and ranks.

The permutation is a keyed Feistel network over the smallest power of two that holds the dataset,
with cycle walking to stay inside it (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002). Its round function is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). All
arithmetic is on 64-bit unsigned integers: the order is the same on every platform. Changing one
number here breaks the resume of every stored run; a test pins them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError, RequestError
from surefoot.data.plan import Batches, Reader

IndexArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_1, _FACTOR_2 = np.uint64(_MULTIPLIER_1), np.uint64(_MULTIPLIER_2)
# Few bits mix slowly: below this width, twice the rounds make even four samples fair.
_NARROW_BITS = 10
_ROUNDS = 12
_NARROW_ROUNDS = 24
# Positions permuted at once: temporaries stay in the processor's cache.
_BLOCK_POSITIONS = 1 << 14
_PURPOSE_ORDER = 1
_PURPOSE_SAMPLE = 2
_PURPOSE_DRAW = 4


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * _MULTIPLIER_1 & _MASK
    word = (word ^ (word >> 27)) * _MULTIPLIER_2 & _MASK
    return word ^ (word >> 31)


def _mix_in_place(words: _Words) -> _Words:
    words ^= words >> _SHIFT_1
    words *= _FACTOR_1
    words ^= words >> _SHIFT_2
    words *= _FACTOR_2
    words ^= words >> _SHIFT_3
    return words


def keyed_hash(*words: int) -> int:
    """Hashes integers in [0, 2**64) to one 64-bit integer, the same on every platform."""
    state = 0
    for word in words:
        state = _mix(((state ^ word) + _GAMMA) & _MASK)
    return state


def sample_seed(seed: int, epoch: int, sample_id: int) -> int:
    """64-bit seed of everything random about one sample in one epoch."""
    return keyed_hash(seed, _PURPOSE_SAMPLE, epoch, sample_id)


def uniform_numbers(seed: int, epoch: int, positions: IndexArray) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each position: the SplitMix64 stream of (seed, epoch), 53 bits."""
    base = np.uint64(keyed_hash(seed, _PURPOSE_DRAW, epoch))
    words = positions.astype(np.uint64) + np.uint64(1)
    words *= np.uint64(_GAMMA)
    words += base
    return (_mix_in_place(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class _Network:
    """The keyed permutation of one epoch."""

    num_samples: int
    low_bits: int
    high_bits: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, seed: int, epoch: int, num_samples: int) -> _Network:
        bits = max(1, (num_samples - 1).bit_length())
        rounds = _NARROW_ROUNDS if bits < _NARROW_BITS else _ROUNDS
        base = keyed_hash(seed, _PURPOSE_ORDER, epoch)
        keys = tuple(_mix((base + r * _GAMMA) & _MASK) for r in range(1, rounds + 1))
        return cls(num_samples, bits - bits // 2, bits // 2, keys)

    def one(self, position: int) -> int:
        low_mask, high_mask = (1 << self.low_bits) - 1, (1 << self.high_bits) - 1
        value = position
        while True:
            high, low = value >> self.low_bits, value & low_mask
            for index, key in enumerate(self.keys):
                if index % 2 == 0:
                    high ^= (_mix(low ^ key) >> 32) & high_mask
                else:
                    low ^= (_mix(high ^ key) >> 32) & low_mask
            value = (high << self.low_bits) | low
            if value < self.num_samples:
                return value

    def many(self, positions: IndexArray) -> IndexArray:
        if 1 << (self.low_bits + self.high_bits) <= 2 * positions.size:
            # About as many positions as values: tabulating all values needs one pass, not several.
            table = self._pass(np.arange(1 << (self.low_bits + self.high_bits), dtype=np.uint64))
            return self._walk(positions.astype(np.uint64), lambda values: table[values])
        return self._walk(positions.astype(np.uint64), self._pass)

    def _walk(self, values: _Words, step: Callable[[_Words], _Words]) -> IndexArray:
        values = step(values)
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            again = step(values[outside])
            values[outside] = again
            outside = outside[again >= self.num_samples]
        return values.astype(np.int64)

    def _pass(self, values: _Words) -> _Words:
        low_mask = np.uint64((1 << self.low_bits) - 1)
        high_mask = np.uint64((1 << self.high_bits) - 1)
        shift, half = np.uint64(self.low_bits), np.uint64(32)
        high, low = values >> shift, values & low_mask
        for index, key in enumerate(self.keys):
            if index % 2 == 0:
                mixed = _mix_in_place(low ^ np.uint64(key))
                mixed >>= half
                mixed &= high_mask
                high ^= mixed
            else:
                mixed = _mix_in_place(high ^ np.uint64(key))
                mixed >>= half
                mixed &= low_mask
                low ^= mixed
        return (high << shift) | low


def _check_key(seed: int, epoch: int, num_samples: int) -> None:
    if not 0 <= seed <= _MASK:
        raise RequestError(
            f"seed {seed} is not usable", where="seed", rule="a seed is an integer in [0, 2**64)"
        )
    if epoch < 0 or not 1 <= num_samples < 1 << 62:
        raise DataError(
            f"no order for epoch {epoch} of {num_samples} samples",
            rule="epoch >= 0 and at least one sample",
            remedy="check that the dataset is not empty",
        )


def permuted_index(seed: int, epoch: int, position: int, num_samples: int) -> int:
    """Sample index at one position of a shuffled epoch.

    For fixed (seed, epoch) this is a permutation of [0, num_samples).
    """
    _check_key(seed, epoch, num_samples)
    if not 0 <= position < num_samples:
        raise DataError(f"position {position} is outside an epoch of {num_samples} samples")
    return _Network.of(seed, epoch, num_samples).one(position)


def permuted_indices(
    seed: int, epoch: int, positions: npt.ArrayLike, num_samples: int
) -> IndexArray:
    """`permuted_index` of many positions at once.

    Args:
        seed: in [0, 2**64).
        epoch: from 0.
        positions: integers in [0, num_samples), any shape.
        num_samples: size of the dataset.

    Returns:
        int64 array of the shape of `positions`.
    """
    _check_key(seed, epoch, num_samples)
    asked = np.asarray(positions, dtype=np.int64)
    if asked.size and (asked.min() < 0 or asked.max() >= num_samples):
        raise DataError(f"a position is outside an epoch of {num_samples} samples")
    network = _Network.of(seed, epoch, num_samples)
    flat = asked.reshape(-1)
    out = np.empty_like(flat)
    for start in range(0, flat.size, _BLOCK_POSITIONS):
        out[start : start + _BLOCK_POSITIONS] = network.many(flat[start : start + _BLOCK_POSITIONS])
    return out.reshape(asked.shape)


class SampleOrder(ABC):
    """Which sample stands at each position of an epoch.

    A pure function of (seed, epoch, position), asked in any order and on every rank: so a run
    resumes at any position, and the ranks share one order. A sample that stands at two positions of
    one epoch is augmented alike at both.

    >>> class Backwards(SampleOrder):
    ...     def indices(self, seed, epoch, positions, num_samples):
    ...         return num_samples - 1 - positions
    >>> plan = BatchPlan(num_samples=5, micro_batch=2, order=Backwards())
    >>> [batch.indices.tolist() for batch in plan.one_epoch()]
    [[4, 3], [2, 1], [0]]
    """

    promise: str = "a function of seed, epoch and position"
    """What a resume may rely on, for the record."""

    def epoch_length(self, num_samples: int) -> int:
        """Positions of one epoch of a dataset of so many samples; the same for all epochs."""
        return num_samples

    @abstractmethod
    def indices(self, seed: int, epoch: int, positions: IndexArray, num_samples: int) -> IndexArray:
        """The sample at each position.

        Args:
            seed: of the run, in [0, 2**64).
            epoch: from 0.
            positions: int64 [N], each in [0, epoch_length).
            num_samples: samples of the dataset.

        Returns:
            int64 [N], each in [0, num_samples).
        """


@dataclass(frozen=True)
class Shuffled(SampleOrder):
    """Another permutation for each epoch, in O(1) memory."""

    def indices(self, seed: int, epoch: int, positions: IndexArray, num_samples: int) -> IndexArray:
        return permuted_indices(seed, epoch, positions, num_samples)


@dataclass(frozen=True)
class InOrder(SampleOrder):
    """The order of the dataset, in every epoch."""

    def indices(self, seed: int, epoch: int, positions: IndexArray, num_samples: int) -> IndexArray:
        return positions


SHUFFLED = Shuffled()
IN_ORDER = InOrder()


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """How far a run has read: a position between two samples of the global order."""

    epoch: int = 0
    position: int = 0
    """Samples of this epoch consumed, over all ranks."""

    def as_json(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cursor:
        return cls(int(value["epoch"]), int(value["position"]))


START = Cursor()


def position_of(cursor: Any) -> Cursor:
    """The cursor of a map-style dataset, also from its JSON form.

    Raises:
        RequestError: it is the cursor of a stream.
    """
    if isinstance(cursor, Cursor):
        return cursor
    if isinstance(cursor, Mapping) and "state" not in cursor:
        return Cursor.from_json(cursor)
    raise RequestError(
        "a map-style dataset cannot continue from the cursor of a stream",
        rule="the data of a run stays of the same kind",
        remedy="resume with the dataset that the run was started with",
    )


_NOTHING: IndexArray = np.empty(0, dtype=np.int64)


class PlannedBatch(NamedTuple):
    """One micro-batch of one rank, before any data is read."""

    epoch: int
    indices: IndexArray
    """Sample indices in order; empty if this rank has run out of data and others have not."""
    cursor_after: Cursor
    """The cursor once every rank has consumed this micro-batch."""
    ends_window: bool
    ends_epoch: bool
    filler: int
    """Index of a sample of the same window: gives an empty micro-batch its shape."""

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """(epoch, sample index) of each sample."""
        return tuple((self.epoch, index) for index in self.indices.tolist())


@dataclass(frozen=True)
class BatchPlan:
    """Divides the order of each epoch into windows and micro-batches.

    A window covers `micro_batch × window_length × num_ranks` consecutive positions; windows start
    anew with each epoch and never cross its end. Micro-batch m of rank r takes the
    (m × num_ranks + r)-th slice of `micro_batch` positions. So a window holds the same samples in
    the same micro-batches for every `window_length × num_ranks` of equal product, and the order is
    a function of the position alone.

    Args:
        num_samples: size of the dataset, at least 1.
        micro_batch: samples of one forward pass on one rank.
        window_length: micro-batches per update on one rank.
        seed: key of the order, in [0, 2**64).
        order: which sample stands at each position.
        drop_short: leave out a short last window of an epoch; otherwise it is kept and its last
            micro-batch may be short, too.
        rank: this data-parallel rank.
        num_ranks: data-parallel ranks.
    """

    num_samples: int
    micro_batch: int
    window_length: int = 1
    seed: int = 0
    order: SampleOrder = SHUFFLED
    drop_short: bool = False
    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        _check_key(self.seed, 0, self.num_samples)
        for name in ("micro_batch", "window_length", "num_ranks"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}", rule=f"{name} >= 1")
        if not 0 <= self.rank < self.num_ranks:
            raise RequestError(
                f"rank {self.rank} of {self.num_ranks}", rule="0 <= rank < num_ranks"
            )
        if self.samples_per_epoch == 0:
            raise RequestError(
                f"an epoch of {self.epoch_length} samples holds no full window of "
                f"{self.samples_per_window}",
                rule="with short windows dropped, an epoch needs at least one full window",
                remedy="keep short windows, or lower the micro-batch or the window length",
            )

    @property
    def samples_per_window(self) -> int:
        """Number of samples of a full window over all ranks."""
        return self.micro_batch * self.window_length * self.num_ranks

    @property
    def epoch_length(self) -> int:
        """Positions of one epoch: samples over all ranks, before any is left out."""
        return self.order.epoch_length(self.num_samples)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples consumed by one epoch over all ranks."""
        length = self.epoch_length
        return length - length % self.samples_per_window if self.drop_short else length

    @property
    def updates_per_epoch(self) -> int:
        """Number of windows of one epoch, including a short last one."""
        return -(-self.samples_per_epoch // self.samples_per_window)

    def micro_batches(self, cursor: Cursor = START) -> Iterator[PlannedBatch]:
        """Micro-batches of this rank from `cursor` on, epoch after epoch, without end."""
        while True:
            yield from self.one_epoch(cursor)
            cursor = Cursor(cursor.epoch + 1, 0)

    def one_epoch(self, cursor: Cursor = START) -> Iterator[PlannedBatch]:
        """Micro-batches of this rank from `cursor` to the end of its epoch."""
        self.check_cursor(cursor)
        epoch, position = cursor.epoch, cursor.position
        end, window, size = self.samples_per_epoch, self.samples_per_window, self.micro_batch
        slot = size * self.num_ranks
        order = _Order(self, epoch)
        while position < end:
            window_start = position - position % window
            window_stop = min(window_start + window, end)
            slot_start = position - (position - window_start) % slot
            slot_stop = min(slot_start + slot, window_stop)
            first = max(slot_start + self.rank * size, position)
            last = min(slot_start + (self.rank + 1) * size, slot_stop)
            indices = order.between(first, last) if first < last else _NOTHING
            filler = int(indices[0] if indices.size else order.between(position, position + 1)[0])
            ends_epoch = slot_stop == end
            position = slot_stop
            after = Cursor(epoch + 1, 0) if ends_epoch else Cursor(epoch, position)
            ends_window = slot_stop == window_stop
            yield PlannedBatch(epoch, indices, after, ends_window, ends_epoch, filler)

    @property
    def order_promise(self) -> str:
        """What a resume may rely on, for the record."""
        return self.order.promise

    def check_fit(self, source: Any, num_workers: int) -> None:
        """Refuses a source that is no map-style dataset of `num_samples`."""
        if not isinstance(source, Sized):
            raise RequestError(
                f"a BatchPlan does not fit {getattr(source, 'name', source)}",
                rule="a stream needs a StreamPlan, a map-style dataset a BatchPlan",
            )
        if self.num_samples != len(source):
            raise RequestError(
                f"the plan orders {self.num_samples} samples, {getattr(source, 'name', source)} "
                f"has {len(source)}",
                rule="a plan is made for the length of its source",
            )

    def read(self, reader: Reader, cursor: Any) -> Batches:
        """Micro-batches of this rank from `cursor` on, epoch after epoch, without end."""
        return reader.planned(self.micro_batches(position_of(cursor)), self.num_samples)

    def read_epoch(self, reader: Reader, cursor: Any) -> Batches:
        """Micro-batches of this rank from `cursor` to the end of its epoch."""
        return reader.planned(self.one_epoch(position_of(cursor)), self.num_samples)

    def check_cursor(self, cursor: Cursor) -> None:
        """Refuses a cursor that no run over this dataset can have reached."""
        if cursor.epoch < 0 or not 0 <= cursor.position <= self.epoch_length:
            raise DataError(
                f"cannot continue at sample {cursor.position} of epoch {cursor.epoch}",
                rule=f"an epoch has {self.epoch_length} samples",
                remedy="use the dataset that the run was started with",
            )


class _Order:
    """Sample indices of one epoch; holds one block of the order, never the whole."""

    def __init__(self, plan: BatchPlan, epoch: int) -> None:
        self._plan = plan
        self._epoch = epoch
        self._length = plan.epoch_length
        self._start = 0
        self._block = _NOTHING

    def between(self, start: int, stop: int) -> IndexArray:
        offset = start - self._start
        if offset < 0 or stop - self._start > self._block.size:
            last = min(max(stop, start + _BLOCK_POSITIONS), self._length)
            self._block = indices_between(self._plan, self._epoch, start, last)
            self._start, offset = start, 0
        return self._block[offset : offset + stop - start]


def indices_between(plan: BatchPlan, epoch: int, start: int, stop: int) -> IndexArray:
    """The samples at the positions from `start` to before `stop`, as the plan's order says.

    Raises:
        DataError: the order gives something else than an index for each position.
    """
    positions = np.arange(start, stop, dtype=np.int64)
    found = np.asarray(plan.order.indices(plan.seed, epoch, positions, plan.num_samples))
    if found.shape != positions.shape or found.dtype.kind not in "iu":
        said = f"{found.dtype} {list(found.shape)} for {positions.size} positions"
    elif found.size and not 0 <= found.min() <= found.max() < plan.num_samples:
        said = f"indices from {found.min()} to {found.max()} of {plan.num_samples} samples"
    else:
        return found.astype(np.int64, copy=False)
    raise DataError(
        f"the order {type(plan.order).__name__} gave {said}",
        where=f"epoch {epoch}, positions {start} to {stop - 1}",
        rule="one index for each position, each in [0, num_samples)",
    )


def order_digest(plan: BatchPlan) -> str:
    """Digest of the first samples of two epochs: another order has another one."""
    last = min(plan.epoch_length, _BLOCK_POSITIONS)
    told = b"".join(indices_between(plan, epoch, 0, last).tobytes() for epoch in (0, 1))
    return hashlib.blake2b(told, digest_size=16).hexdigest()
