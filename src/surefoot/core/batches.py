"""Names of batch entries, and the number of samples of a batch, shared by data and tasks.

Imports no torch.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

TARGET_NAMES: Final = ("labels", "label", "targets", "target", "y")
"""Names of the target in a batch with named entries; the first that is present counts."""
TARGET_MASK: Final = "target_mask"
"""Name of the mask, of the target's shape or [B], that is false where a target does not count."""

_fetched: ContextVar[int | None] = ContextVar("samples of the batch in hand", default=None)


class batch_of_samples:
    """Context manager: the current batch has `count` samples, counted when it was fetched.

    The shapes of a batch need not show it: a collate function may put time first, or merge the
    graphs of all samples into one.
    """

    __slots__ = ("_count", "_token")

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._token = _fetched.set(self._count)

    def __exit__(self, *_: object) -> None:
        _fetched.reset(self._token)


def fetched_samples() -> int | None:
    """Samples of the current batch, or None if they were not counted."""
    return _fetched.get()
