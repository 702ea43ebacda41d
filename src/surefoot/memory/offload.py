"""Offloads the activations of blocks to host memory until the backward.

Results are bit-equal. Weights are not moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from surefoot.memory.blocks import blocks_for


def offload_blocks(model: nn.Module, device: torch.device) -> int:
    """Makes blocks save activations for the backward on the host, in place; names stay.

    Args:
        device: of the model; for CUDA, host memory is pinned.

    Returns:
        Number of blocks.

    Raises:
        RequestError: the model has no repeated layers.
    """
    blocks = blocks_for(
        model, "memory.offload_activations", "activations of blocks are offloaded", "off"
    )
    for block in blocks:
        block.forward = _offloaded(block.forward, pin_memory=device.type == "cuda")
    return len(blocks)


class ActivationsOnHost(save_on_cpu):
    """torch's saved-tensor hooks, except for parameters, which are present in the backward."""

    def __init__(self, pin_memory: bool) -> None:
        super().__init__(pin_memory=pin_memory)
        to_host: Callable[[Tensor], Any] = self.pack_hook
        from_host: Callable[[Any], Tensor] = self.unpack_hook
        self.pack_hook = lambda tensor: tensor if is_weight(tensor) else to_host(tensor)
        self.unpack_hook = lambda kept: kept if isinstance(kept, Tensor) else from_host(kept)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one such as its transpose."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _offloaded(forward: Callable[..., Any], *, pin_memory: bool) -> Callable[..., Any]:
    def kept_on_host(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        with ActivationsOnHost(pin_memory):
            return forward(*arguments, **named)

    return kept_on_host
