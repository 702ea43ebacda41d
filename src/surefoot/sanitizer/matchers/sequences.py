"""What the rules about sequence labels share: how targets are shifted against the input ids.

Looks at a few calls only, and keeps ids no longer than until the next forward.
"""

from __future__ import annotations

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.listener import Listener

MOST_LOOKS = 4
"""Loss calls per place that are looked at."""
LEAST_POSITIONS = 8
MATCH = 0.99
OTHER = 0.9
MOST_ELEMENTS = 1 << 20


class RecentIds(Listener):
    """The integer sequences that were embedded since the last forward began."""

    def setup(self) -> None:
        self.ids: list[torch.Tensor] = []
        self.padding: list[int | None] = []
        self._latest: tuple[int, list[int]] = 0, []

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        self.ids, self.padding = [], []

    def on_embedding_called(self, event: ev.EmbeddingCalled) -> None:
        ids = event.ids
        if ids.dim() != 2 or ids.device.type != "cpu" or not 3 <= ids.numel() < MOST_ELEMENTS:
            return
        if ids.shape[1] < 3 or _are_positions(ids):
            return
        self.ids = [*self.ids[-3:], ids.detach()]
        self.padding = [*self.padding[-3:], event.padding_idx]

    def offsets(self, event: ev.LossCalled) -> list[int]:
        """The offsets of a loss's targets against each sequence that was embedded."""
        if self._latest[0] != event.seq:
            ignore = event.options.get("ignore_index", -100)
            pairs = [
                (rows, ids) for ids in self.ids if (rows := rows_of(event.target, ids)) is not None
            ]
            found = (offset_of(rows, ids, ignore) for rows, ids in pairs)
            self._latest = event.seq, [offset for offset in found if offset is not None]
        return self._latest[1]


def _are_positions(ids: torch.Tensor) -> bool:
    """Whether all rows are the same, or the only row counts up."""
    if ids.shape[0] > 1:
        return bool((ids == ids[:1]).all())
    return bool((ids.diff() == 1).all())


def rows_of(target: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
    """Targets as rows that belong to the rows of `ids`: [batch, length], length <= ids' length."""
    if target.is_floating_point() or target.device.type != "cpu":
        return None
    batch, length = ids.shape
    if target.dim() == 2 and target.shape[0] == batch and 2 < target.shape[1] <= length:
        return target.detach()
    if target.dim() == 1 and target.numel() % batch == 0:
        per_row = target.numel() // batch
        if 2 < per_row <= length and length - per_row <= 2:
            return target.detach().reshape(batch, per_row)
    return None


def matches(rows: torch.Tensor, ids: torch.Tensor, ignore: int) -> dict[int, float]:
    """Share of the targets that count and equal the id `offset` places on, for offsets 0, 1, 2.

    Offset 0 is only told for targets as long as the ids. An empty result says nothing can be told.
    """
    length = rows.shape[1]
    shares = {}
    for offset in (0, 1, 2):
        usable = min(length, ids.shape[1] - offset)
        if usable < 2 or (offset == 0 and length != ids.shape[1]):
            continue
        part = rows[:, :usable]
        counted = part != ignore
        number = int(counted.sum())
        if number < LEAST_POSITIONS or number < 0.5 * part.numel():
            return {}
        same = (part == ids[:, offset : offset + usable]) & counted
        shares[offset] = int(same.sum()) / number
    return shares


def offset_of(rows: torch.Tensor, ids: torch.Tensor, ignore: int) -> int | None:
    """The one offset at which targets and ids agree; None where none, or several (periodic)."""
    shares = matches(rows, ids, ignore)
    agreeing = [offset for offset, value in shares.items() if value >= MATCH]
    others = [value for offset, value in shares.items() if offset not in agreeing]
    if len(agreeing) == 1 and all(value < OTHER for value in others):
        return agreeing[0]
    return None
