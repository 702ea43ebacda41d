"""What those who fetch a batch and those who read it agree on: names of entries, and its samples.

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
    """A context in which the batch in hand is known to hold `count` samples, counted when fetched.

    The shapes of a batch need not say it: a collate function may put time first, or join the
    graphs of all samples to one.
    """

    __slots__ = ("_count", "_token")

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._token = _fetched.set(self._count)

    def __exit__(self, *_: object) -> None:
        _fetched.reset(self._token)


def fetched_samples() -> int | None:
    """Samples of the batch in hand, or None where nobody has counted them."""
    return _fetched.get()
