"""The order of the data as a pure function of (seed, epoch, position).

Says which samples make up each micro-batch and window. It holds no list of the whole epoch, draws
from no random stream and never loads a sample, so a run resumes at any position at once, with any
number of workers and ranks.

The permutation is a keyed Feistel network over the smallest power of two that holds the dataset,
with cycle walking to stay inside it (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002). Its round function is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). All
arithmetic is on 64-bit unsigned integers: the order is the same on every platform. Changing one
number here breaks the resume of every stored run; a test pins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError, RequestError

IndexArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_1, _FACTOR_2 = np.uint64(_MULTIPLIER_1), np.uint64(_MULTIPLIER_2)
# Few bits mix slowly: below this width twice the rounds make even four samples fair.
_NARROW_BITS = 10
_ROUNDS = 12
_NARROW_ROUNDS = 24
# Positions permuted at once: the temporaries stay in the processor's cache.
_BLOCK = 1 << 14
_PURPOSE_ORDER = 1
_PURPOSE_SAMPLE = 2


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
    """Hash integers in [0, 2**64) to one 64-bit integer, the same on every platform."""
    state = 0
    for word in words:
        state = _mix(((state ^ word) + _GAMMA) & _MASK)
    return state


def sample_seed(seed: int, epoch: int, sample_id: int) -> int:
    """64-bit seed of everything random about one sample in one epoch."""
    return keyed_hash(seed, _PURPOSE_SAMPLE, epoch, sample_id)


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
            # About as many positions as values: walking by table needs one pass, not several.
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

    For fixed (seed, epoch) it maps [0, num_samples) onto itself, each value once.
    """
    _check_key(seed, epoch, num_samples)
    if not 0 <= position < num_samples:
        raise DataError(f"position {position} lies outside an epoch of {num_samples} samples")
    return _Network.of(seed, epoch, num_samples).one(position)


def permuted_indices(
    seed: int, epoch: int, positions: npt.ArrayLike, num_samples: int
) -> IndexArray:
    """`permuted_index` of many positions at once.

    Args:
        seed: in [0, 2**64).
        epoch: from 0.
        positions: integers in [0, num_samples), any shape.
        num_samples: samples of the dataset.

    Returns:
        int64 array of the shape of `positions`.
    """
    _check_key(seed, epoch, num_samples)
    asked = np.asarray(positions, dtype=np.int64)
    if asked.size and (asked.min() < 0 or asked.max() >= num_samples):
        raise DataError(f"a position lies outside an epoch of {num_samples} samples")
    network = _Network.of(seed, epoch, num_samples)
    flat = asked.reshape(-1)
    out = np.empty_like(flat)
    for start in range(0, flat.size, _BLOCK):
        out[start : start + _BLOCK] = network.many(flat[start : start + _BLOCK])
    return out.reshape(asked.shape)


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
_NOTHING: IndexArray = np.empty(0, dtype=np.int64)


class PlannedBatch(NamedTuple):
    """One micro-batch of one rank, before any data is read."""

    epoch: int
    indices: IndexArray
    """Sample indices in order; empty where this rank has run out and others have not."""
    cursor_after: Cursor
    """Where the run stands once every rank has consumed this micro-batch."""
    ends_window: bool
    ends_epoch: bool
    filler: int
    """Index of a sample of the same window: it gives an empty micro-batch its shape."""

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """(epoch, sample index) of each sample."""
        return tuple((self.epoch, index) for index in self.indices.tolist())


@dataclass(frozen=True)
class BatchPlan:
    """Cuts the order of each epoch into windows and micro-batches.

    A window covers `micro_batch × window_length × num_ranks` consecutive positions; windows lie on
    a grid that begins at each epoch, and never cross its end. Micro-batch m of rank r takes the
    (m × num_ranks + r)-th slice of `micro_batch` positions. So a window holds the same samples in
    the same micro-batches for every `window_length × num_ranks` of equal product, and the order is
    a function of the position alone.

    Args:
        num_samples: samples of the dataset, at least 1.
        micro_batch: samples of one forward pass on one rank.
        window_length: micro-batches per update on one rank.
        seed: key of the order, in [0, 2**64).
        shuffle: another permutation for each epoch; otherwise the order of the dataset.
        drop_short: leave out the last window of an epoch where it is short; otherwise it is kept
            and its last micro-batch may be short too.
        rank: this data-parallel rank.
        num_ranks: data-parallel ranks.
    """

    num_samples: int
    micro_batch: int
    window_length: int = 1
    seed: int = 0
    shuffle: bool = True
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
                f"an epoch of {self.num_samples} samples holds no whole window of "
                f"{self.samples_per_window}",
                rule="with short windows dropped, an epoch needs at least one whole window",
                remedy="keep short windows, or lower the micro-batch or the window length",
            )

    @property
    def samples_per_window(self) -> int:
        """Samples of a whole window over all ranks."""
        return self.micro_batch * self.window_length * self.num_ranks

    @property
    def samples_per_epoch(self) -> int:
        """Samples consumed by one epoch over all ranks."""
        if self.drop_short:
            return self.num_samples - self.num_samples % self.samples_per_window
        return self.num_samples

    @property
    def updates_per_epoch(self) -> int:
        """Windows of one epoch, a short last one included."""
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

    def check_cursor(self, cursor: Cursor) -> None:
        """Refuse a cursor that no run over this dataset can have reached."""
        if cursor.epoch < 0 or not 0 <= cursor.position <= self.num_samples:
            raise DataError(
                f"cannot continue at sample {cursor.position} of epoch {cursor.epoch}",
                rule=f"the dataset has {self.num_samples} samples",
                remedy="use the dataset that the run was started with",
            )


class _Order:
    """Sample indices of one epoch; holds one block of the permutation, never the whole."""

    def __init__(self, plan: BatchPlan, epoch: int) -> None:
        self._plan = plan
        self._epoch = epoch
        self._start = 0
        self._block = _NOTHING

    def between(self, start: int, stop: int) -> IndexArray:
        offset = start - self._start
        if offset < 0 or stop - self._start > self._block.size:
            plan = self._plan
            last = min(max(stop, start + _BLOCK), plan.num_samples)
            positions = np.arange(start, last, dtype=np.int64)
            self._block = (
                permuted_indices(plan.seed, self._epoch, positions, plan.num_samples)
                if plan.shuffle
                else positions
            )
            self._start, offset = start, 0
        return self._block[offset : offset + stop - start]
