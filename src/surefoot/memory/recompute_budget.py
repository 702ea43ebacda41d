"""Recomputes blocks beyond a memory budget; the others keep their activations.

Results are bit-equal, as with `recompute`: which blocks recompute changes no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from surefoot.memory.blocks import blocks_for
from surefoot.memory.offload import is_weight


class ActivationBudget:
    """Decides in each forward, block by block, which ones keep activations for the backward.

    A block is measured whenever it keeps its activations. The next size is estimated from the last
    one in proportion to the size of its input, so that longer sequences recompute more blocks. The
    first block of the first forward is always kept: nothing has been measured yet.

    Args:
        limit_bytes: limit for the activations of all blocks of one forward, not counting the inputs
            of recomputed blocks.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.kept_bytes = 0
        """Kept in the latest forward."""
        self.kept_blocks = 0
        self._per_element: dict[int, float] = {}
        self._seen: set[int] = set()

    def spend_on(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `forward` of block `number`, counted from 0 in execution order."""

        def budgeted(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            if number == 0:
                self.kept_bytes, self.kept_blocks, self._seen = 0, 0, set()
            size = _elements((*arguments, *named.values()))
            if self.kept_bytes + self._foreseen(number, size) > self.limit_bytes:
                return checkpoint(forward, *arguments, use_reentrant=False, **named)
            before = self.kept_bytes
            with saved_tensors_hooks(self._count, lambda kept: kept):
                result = forward(*arguments, **named)
            self.kept_blocks += 1
            self._per_element[number] = (self.kept_bytes - before) / size
            return result

        return budgeted

    def _foreseen(self, number: int, size: int) -> float:
        known = self._per_element.get(number, max(self._per_element.values(), default=0.0))
        return known * size

    def _count(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            # Of a DTensor, the local shard.
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        # Not by address: a tensor still being received from other ranks has none.
        if not is_weight(tensor) and storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.kept_bytes += storage.nbytes()
        return tensor


def budget_blocks(model: nn.Module, limit_bytes: int) -> ActivationBudget:
    """Gives the blocks of a model a common budget, in place; names stay.

    Raises:
        RequestError: the model has no repeated layers.
    """
    blocks = blocks_for(model, "memory.recompute", "the budget applies to blocks", "none")
    budget = ActivationBudget(limit_bytes)
    for number, block in enumerate(blocks):
        block.forward = budget.spend_on(number, block.forward)
    return budget


def _elements(values: tuple[Any, ...]) -> int:
    return max((value.numel() for value in values if isinstance(value, Tensor)), default=1) or 1
