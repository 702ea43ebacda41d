"""Whether what stands behind a loss may look ahead in its sequence, read from the graph.

Runs nothing: looks at what the attention nodes saved for their own backward.
"""

from __future__ import annotations

from typing import Any

import torch

from surefoot.sanitizer import graph

WALK = 20_000
MASKED = -1e3


def looks_ahead(root: Any, length: int) -> tuple[int, int]:
    """Numbers of causal and of not causal self-attentions over `length` places behind `root`."""
    causal = ahead = 0
    for node in graph.nodes(root, WALK):
        verdict = _verdict(node, length)
        if verdict is True:
            causal += 1
        elif verdict is False:
            ahead += 1
    return causal, ahead


def _verdict(node: Any, length: int) -> bool | None:
    name = graph.kind(node)
    if name.startswith("ScaledDotProduct"):
        shape = graph.output_shape(node)
        if shape is None or len(shape) != 4 or shape[-2] != length:
            return None
        key = graph.saved(node, "key")
        if not isinstance(key, torch.Tensor) or key.shape[-2] != length:
            return None
        if graph.saved(node, "is_causal"):
            return True
        mask = graph.saved(node, "attn_mask")
        mask = graph.saved(node, "attn_bias") if mask is None else mask
        return _mask_is_causal(mask, length)
    if name == "Convolution":
        return _convolution_is_causal(node, length)
    if name in ("Softmax", "SafeSoftmax"):
        shape = graph.output_shape(node)
        if shape is None or len(shape) < 3 or shape[-2:] != (length, length):
            return None
        result = graph.saved(node, "result")
        if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
            return None
        sample = result.detach().reshape(-1, length, length)[:4]
        return not bool((sample.triu(1) > 1e-6).any())
    return None


def _convolution_is_causal(node: Any, length: int) -> bool | None:
    """Whether a convolution over that many places sees none after each; None for another axis."""
    shape, weight = graph.output_shape(node), graph.saved(node, "weight")
    if shape is None or len(shape) != 3 or not isinstance(weight, torch.Tensor):
        return None
    reach = (weight.shape[-1] - 1) * node._saved_dilation[-1]
    right = node._saved_padding[-1]
    if not reach or node._saved_stride[-1] != 1:
        return None
    if shape[-1] == length + right:
        # What was padded on the right is cut off again.
        return True if right else _pads_left_only(node)
    return False if shape[-1] == length else None


def _pads_left_only(node: Any) -> bool | None:
    before = graph.through_views(node.next_functions[0][0])
    pads = getattr(before, "_saved_pad", None) if before is not None else None
    return None if not pads or len(pads) < 2 else pads[1] == 0


def _mask_is_causal(mask: Any, length: int) -> bool | None:
    if mask is None:
        return False
    if not isinstance(mask, torch.Tensor) or mask.device.type != "cpu":
        return None
    if mask.dim() < 2 or mask.shape[-2:] != (length, length):
        return False if mask.dim() >= 2 and mask.shape[-2] == 1 else None
    sample = mask.detach().reshape(-1, length, length)[:4]
    above = torch.ones(length, length, dtype=torch.bool).triu(1)
    values = sample[:, above]
    hidden = ~values if values.dtype == torch.bool else values < MASKED
    return bool(hidden.all())
