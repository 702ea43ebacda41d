"""What follows an update, once the optimizer has stepped: averages, biases of routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class AfterUpdate(Protocol):
    """Follows the weights, such as a running average of them."""

    def update(self, finite: Callable[[], Tensor]) -> None:
        """Follows an update; does nothing where `finite()` (0-dim bool) is false."""
        ...


class InTurn:
    """Several that follow an update, in their order."""

    def __init__(self, *followers: AfterUpdate) -> None:
        self._followers = followers

    def update(self, finite: Callable[[], Tensor]) -> None:
        for follower in self._followers:
            follower.update(finite)
