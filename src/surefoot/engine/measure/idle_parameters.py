"""Names trainable parameters that the first update does not reach. Changes no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from surefoot.numerics.clipping import gradients_of

MOST_NAMED: Final = 5


class IdleParameters:
    """`gradients_of` that looks once at which parameters have none.

    Args:
        names: of the parameters, in their order.
        tell: is told a sentence about those without a gradient.
    """

    def __init__(self, names: Sequence[str], tell: Callable[[str], None]) -> None:
        self._names = names
        self._tell = tell
        self._has_looked = False

    def __call__(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that are there, in the order of the parameters."""
        gradients = gradients_of(parameters)
        if not self._has_looked:
            self._has_looked = True
            if len(gradients) < len(parameters):
                self._look(parameters)
        return gradients

    def _look(self, parameters: Sequence[Tensor]) -> None:
        pairs = zip(self._names, parameters, strict=True)
        idle = [name for name, parameter in pairs if parameter.grad is None]
        more = len(idle) - MOST_NAMED
        self._tell(
            f"{len(idle)} of {len(parameters)} trainable parameters got no gradient in the first "
            f"update: {', '.join(idle[:MOST_NAMED])}"
            + (f" and {more} more" if more > 0 else "")
            + "; what takes no part in the loss is not trained. Freeze it (requires_grad_(False), "
            "model.frozen) if that is meant"
        )
