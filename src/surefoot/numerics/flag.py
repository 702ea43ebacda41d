"""Whether an update counts, as a number on the device that is made only where somebody needs it.

Where the host has seen the gradient norm before the optimizer steps, and nothing else follows the
flag, its kernel is never launched. It is made at most once, and never waited for.
"""

from __future__ import annotations

from torch import Tensor


class Flag:
    """`norm < limit`, a 0-dim bool tensor beside the norm; false for NaN.

    Args:
        norm: global gradient norm, 0-dim; not changed between the making and the first call.
        limit: what the guard lets through; infinity for all that is finite.
    """

    __slots__ = ("_limit", "_norm", "_value")

    def __init__(self, norm: Tensor, limit: float) -> None:
        self._norm = norm
        self._limit = limit
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._value is None:
            self._value = self._norm < self._limit
        return self._value
