"""Packs several short sequences into rows of equal length, planned once.

Sequences are split only on request, no token attends to another sequence, and the first token of
each is not a target. The plan depends on the lengths alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from surefoot.core.errors import DataError, RequestError
from surefoot.data.order import IndexArray
from surefoot.data.sources.base import Source, hash_parts

IGNORE_INDEX = -100


@dataclass(frozen=True)
class PackPlan:
    """Which pieces of which sequences are in which pack."""

    capacity: int
    """Number of tokens of a pack."""
    starts: IndexArray
    """[packs + 1]: pack p holds the pieces `starts[p]` to `starts[p + 1]`."""
    sequences: IndexArray
    """[pieces]: the sequence of each piece."""
    offsets: IndexArray
    """[pieces]: index of the first token of the piece within its sequence."""
    lengths: IndexArray
    """[pieces]: number of tokens."""

    @property
    def num_packs(self) -> int:
        return len(self.starts) - 1

    @property
    def padding_fraction(self) -> float:
        """Share of padding among all positions."""
        return 1.0 - int(self.lengths.sum()) / (self.capacity * self.num_packs)

    def fingerprint(self) -> str:
        """Hash of the plan."""
        arrays = (self.starts, self.sequences, self.offsets, self.lengths)
        return hash_parts(self.capacity, *(array.tobytes() for array in arrays))


def plan_packs(
    lengths: npt.ArrayLike, capacity: int, too_long: Literal["stop", "split"] = "stop"
) -> PackPlan:
    """Packs sequences best-fit decreasing: longest first, each into the pack with the least room.

    Needs at most 11/9 of the smallest number of packs plus four (Johnson et al., "Worst-case
    performance bounds for simple one-dimensional packing algorithms", 1974).

    Args:
        lengths: number of tokens of each sequence, integers [sequences]; empty ones are left out.
        capacity: number of tokens of a pack.
        too_long: for a sequence longer than a pack: `stop`, or `split` it into pieces.

    Raises:
        RequestError: the capacity is below 2.
        DataError: a sequence does not fit, or there are none.
    """
    if capacity < 2:
        raise RequestError(f"a pack of {capacity} token(s)", rule="at least 2 tokens")
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and too_long == "stop" and sizes.max() > capacity:
        worst = int(sizes.argmax())
        raise DataError(
            f"sequence {worst} has {sizes[worst]} tokens, a pack {capacity}",
            where=f"sequence {worst}",
            rule="each sequence fits into a pack",
            remedy="raise sequence_length, shorten the sequence, or allow it to be split",
        )
    sequences, offsets, pieces = _pieces(sizes, capacity)
    if not pieces.size:
        raise DataError("there are no tokens to pack", rule="at least one sequence with a token")
    members = _best_fit(pieces, capacity)
    counts = np.array([len(pack) for pack in members], dtype=np.int64)
    order = np.array([piece for pack in members for piece in pack], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    return PackPlan(capacity, starts, sequences[order], offsets[order], pieces[order])


def _pieces(sizes: IndexArray, capacity: int) -> tuple[IndexArray, IndexArray, IndexArray]:
    counts = -(-sizes // capacity)
    sequences = np.repeat(np.arange(sizes.size, dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    offsets = (np.arange(sequences.size, dtype=np.int64) - first[sequences]) * capacity
    return sequences, offsets, np.minimum(sizes[sequences] - offsets, capacity)


def _best_fit(pieces: IndexArray, capacity: int) -> list[list[int]]:
    members: list[list[int]] = []
    # Remaining room -> packs with that room; the keys in use are kept sorted.
    packs_with: dict[int, list[int]] = {}
    rooms: list[int] = []
    for piece in np.argsort(-pieces, kind="stable").tolist():
        length = int(pieces[piece])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            room = capacity
            pack = len(members)
            members.append([])
        else:
            room = rooms[place]
            pack = packs_with[room].pop()
            if not packs_with[room]:
                del packs_with[room], rooms[place]
        members[pack].append(piece)
        left = room - length
        if left:
            if left not in packs_with:
                packs_with[left] = []
                bisect.insort(rooms, left)
            packs_with[left].append(pack)
    return members


class PackedSource:
    """Packs of sequences as samples.

    A batch is a dict of int64 tensors [B, S]: `input_ids`, `labels` (aligned; -100 on padding, on
    the first token of each piece and where the sequences' own labels say so), `document_ids` (from
    0 in each pack; padding counts as a document) and `position_ids` (from 0 in each piece).

    Args:
        sequences: source of token ids [length], or of mappings with `input_ids` and optionally
            `labels`, both [length]. Must not be random.
        sequence_length: S, number of tokens of a pack.
        pad_id: padding token.
        too_long: see `plan_packs`.
        lengths: number of tokens of each sequence; if not given, each is read once.

    Raises:
        RequestError: the source is random.
        DataError: a sequence does not fit.
    """

    is_random = False

    def __init__(
        self,
        sequences: Source,
        sequence_length: int,
        *,
        pad_id: int = 0,
        too_long: Literal["stop", "split"] = "stop",
        lengths: npt.ArrayLike | None = None,
    ) -> None:
        if sequences.is_random:
            raise RequestError(
                f"{sequences.name} is random and cannot be packed",
                rule="packs are planned once, for sequences that do not change",
                remedy="set is_random=False if reading a sample draws no random number",
            )
        self.name = f"{sequences.name} (packed)"
        self._sequences = sequences
        self._pad_id = pad_id
        if lengths is None:
            lengths = [len(_tokens(sequences[index])[0]) for index in range(len(sequences))]
        self.plan = plan_packs(lengths, sequence_length, too_long)

    def __len__(self) -> int:
        return self.plan.num_packs

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        plan = self.plan
        shape = (plan.capacity,)
        input_ids = np.full(shape, self._pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        first, last = int(plan.starts[index]), int(plan.starts[index + 1])
        # Padding keeps this id, one more than the last document's.
        document_ids = np.full(shape, last - first, dtype=np.int64)
        at = 0
        for piece in range(first, last):
            length, offset = int(plan.lengths[piece]), int(plan.offsets[piece])
            tokens, targets = _tokens(self._sequences[int(plan.sequences[piece])])
            place = slice(at, at + length)
            input_ids[place] = tokens[offset : offset + length]
            labels[place] = targets[offset : offset + length]
            labels[at] = IGNORE_INDEX
            document_ids[place] = piece - first
            position_ids[place] = np.arange(length)
            at += length
        arrays = {
            "input_ids": input_ids,
            "labels": labels,
            "document_ids": document_ids,
            "position_ids": position_ids,
        }
        return {key: torch.from_numpy(array) for key, array in arrays.items()}

    def collate(self, samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Stacks packs."""
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}

    def locate(self, index: int) -> str:
        """The sequences of a pack."""
        first, last = int(self.plan.starts[index]), int(self.plan.starts[index + 1])
        return f"sequences {self.plan.sequences[first:last].tolist()} of {self._sequences.name}"

    def fingerprint(self) -> str:
        """Hash of the sequences' fingerprint and of the plan."""
        kind, _, text = self._sequences.fingerprint().partition(":")
        return f"{kind}:{hash_parts(text, self.plan.fingerprint(), self._pad_id)}"


def _tokens(sample: Any) -> tuple[IndexArray, IndexArray]:
    """Token ids and labels of a sequence, both int64 [length]."""
    named = isinstance(sample, Mapping)
    tokens = np.asarray(sample["input_ids"] if named else sample, dtype=np.int64)
    labels = (
        np.asarray(sample["labels"], dtype=np.int64) if named and "labels" in sample else tokens
    )
    if tokens.ndim != 1 or labels.shape != tokens.shape:
        raise DataError(
            f"a sequence has tokens {list(tokens.shape)} and labels {list(labels.shape)}",
            rule="token ids and labels are one-dimensional and of equal length",
        )
    return tokens, labels
