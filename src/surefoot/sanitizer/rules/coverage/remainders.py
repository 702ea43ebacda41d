"""Whether an optimizer keeps what rounding takes from half-precision weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers.leaves import sample_of

DIGITS = {torch.bfloat16: 7, torch.float16: 10}
MOST = 0.98
SPREAD = 0.02
MOST_TENSORS = 512


def keeps_remainder(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> bool:
    """Whether it has, beside a weight, its value in float32 or what rounding left of it."""
    if type(optimizer).__module__.startswith("torch.optim"):
        # What those keep are moments, which can look like anything.
        return False
    weight = sample_of(tensor).float()
    return any(
        _is_master(sample_of(other), weight, tensor.dtype)
        or _is_remainder(sample_of(other).float(), weight, tensor.dtype)
        for other in _beside(optimizer, tensor)
    )


def _beside(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    own = optimizer.state.get(tensor)
    for other in graph.tensors_in(own if isinstance(own, dict) else {}):
        if other.numel() == tensor.numel() and other.is_floating_point():
            yield other
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    for count, other in enumerate(graph.tensors_in(attributes)):
        if count >= MOST_TENSORS:
            return
        if other.shape == tensor.shape and other.is_floating_point() and other is not tensor:
            yield other


def _is_master(other: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    if other.dtype not in (torch.float32, torch.float64):
        return False
    same = (other.to(dtype).float() == weight).float().mean()
    return float(same) >= MOST and not torch.equal(other.float(), weight)


def _is_remainder(other: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    # What rounding to the nearest leaves is at most half of the last digit's worth, and any part
    # of that; a moment of gradients has nothing to do with the digits of the weight.
    last = torch.ldexp(torch.ones_like(weight), torch.frexp(weight).exponent - 1 - DIGITS[dtype])
    parts = other.abs() / last
    return float((parts <= 0.51).float().mean()) >= MOST and float(parts.median()) >= SPREAD
