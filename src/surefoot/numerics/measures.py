"""Measures of a model in training, on the device: how far weights move, which units are dead.

Nothing here waits for the device, draws a random number or changes a tensor of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from surefoot.numerics.clipping import tensor_norms

DEAD_BELOW: Final = 1e-3
"""A unit whose output stays this close to 0 is dead (ReLU: exactly 0; GELU and SiLU reach it)."""
SATURATED_BEYOND: Final = 0.99
"""Of the way from the middle of tanh or sigmoid to its end, where its slope is below 2 %."""

_RECTIFIERS: Final = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish)
_SQUASHERS: Final = (nn.Tanh, nn.Sigmoid)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in as few launches as there are devices and number types."""
    return list(torch._foreach_mul([tensor.detach() for tensor in tensors], 1.0))


def update_ratio(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """`||after - before|| / ||before||` over all tensors as one vector; 0-dim.

    About 1e-3 is usual for Adam in mid-training (A. Karpathy, "makemore", part 3); far below it the
    weights stand still, far above they jump.
    """
    moved = torch._foreach_sub([tensor.detach() for tensor in after], list(before))
    norms = [torch.linalg.vector_norm(tensor_norms(tensors)) for tensors in (moved, before)]
    ratio: Tensor = norms[0] / norms[1]
    return ratio


class UnitWatch:
    """Shares of dead and of saturated units of a model's activation modules.

    A unit is a channel of a picture, else an entry of the last axis. It is dead where its output
    stays below `DEAD_BELOW` for every item of all forwards inside `watching`. Of tanh and sigmoid,
    the share of outputs beyond `SATURATED_BEYOND` counts. Functions that are no module are unseen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rectifiers = [m for m in model.modules() if isinstance(m, _RECTIFIERS)]
        self._squashers = [m for m in model.modules() if isinstance(m, _SQUASHERS)]
        self._largest: dict[nn.Module, Tensor] = {}
        self._saturated: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks at the outputs of the forwards inside."""
        self._largest.clear()
        self._saturated.clear()
        handles = [m.register_forward_hook(self._look_at_rectifier) for m in self._rectifiers]
        handles += [m.register_forward_hook(self._look_at_squasher) for m in self._squashers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def shares(self) -> dict[str, Tensor]:
        """`dead_units` and `saturated_units`, 0-dim, where there was such a module."""
        found = {}
        if self._largest:
            largest = torch.cat(list(self._largest.values()))
            found["dead_units"] = (largest < DEAD_BELOW).float().mean()
        if self._saturated:
            found["saturated_units"] = torch.stack(self._saturated).mean()
        return found

    def _look_at_rectifier(self, module: nn.Module, _: object, output: Tensor) -> None:
        # [batch, channels, height, width] of pictures, [batch, positions, units] of sequences.
        unit_axis = 1 if output.ndim > 3 else output.ndim - 1
        others = [axis for axis in range(output.ndim) if axis != unit_axis]
        largest = output.detach().abs()
        if others:
            largest = largest.amax(dim=others)
        seen = self._largest.get(module)
        same = seen is not None and seen.shape == largest.shape
        self._largest[module] = torch.maximum(seen, largest) if same else largest  # type: ignore[arg-type]

    def _look_at_squasher(self, module: nn.Module, _: object, output: Tensor) -> None:
        value = output.detach()
        distance = value.abs() if isinstance(module, nn.Tanh) else (2.0 * value - 1.0).abs()
        self._saturated.append((distance > SATURATED_BEYOND).float().mean())
