"""Activation recomputation in the backward.

Results are bit-equal: the same kernels see the same inputs, and dropout draws the same masks.
Parameter names are unchanged.
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
"""Kept by `selective`: matrix products and attention, the most expensive to recompute."""


def recompute_blocks(model: nn.Module, extent: Extent, every: int = 1) -> int:
    """Makes blocks recompute their activations in the backward, in place.

    Args:
        extent: `blocks` keeps only a block's input; `selective` also the results in `KEPT`.
        every: recompute each n-th block, starting with the first.

    Returns:
        Number of recomputed blocks.

    Raises:
        RequestError: the model has no repeated layers.
    """
    if extent == "none":
        return 0
    blocks = blocks_for(model, "memory.recompute", "recomputation works on blocks", "none")
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
