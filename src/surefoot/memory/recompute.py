"""Activations that are computed again in the backward instead of being kept.

The numbers are the same to the bit: the same kernels see the same inputs, and dropout draws the
same masks. Names of parameters stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from surefoot.memory.blocks import blocks_for

Extent = Literal["none", "blocks", "selective"]

_aten = torch.ops.aten
KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What `selective` keeps: products of matrices and attention, which cost most to compute again."""


def recompute_blocks(model: nn.Module, extent: Extent, every: int = 1) -> int:
    """Makes blocks compute their activations again in the backward, in place.

    Args:
        extent: `blocks` keeps a block's input alone; `selective` also the results in `KEPT`.
        every: each n-th block, the first among them.

    Returns:
        How many blocks do.

    Raises:
        RequestError: the model has no layers that repeat.
    """
    if extent == "none":
        return 0
    blocks = blocks_for(model, "memory.recompute", "what is computed again is a block", "none")
    chosen: Sequence[nn.Module] = blocks[::every]
    for block in chosen:
        block.forward = _again(block.forward, extent)
    return len(chosen)


def _again(forward: Callable[..., Any], extent: Extent) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if extent == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def recomputed(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, **options, **named)

    return recomputed


def _policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    keep = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
