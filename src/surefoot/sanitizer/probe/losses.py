"""Observes torch's loss functions: what goes in and what comes out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn import functional

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site, user_site
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.trace import Trace

LOSSES = {
    "cross_entropy": ("weight", "size_average", "ignore_index", "reduce", "reduction"),
    "nll_loss": ("weight", "size_average", "ignore_index", "reduce", "reduction"),
    "binary_cross_entropy": ("weight", "size_average", "reduce", "reduction"),
    "binary_cross_entropy_with_logits": (
        "weight",
        "size_average",
        "reduce",
        "reduction",
        "pos_weight",
    ),
    "kl_div": ("size_average", "reduce", "reduction", "log_target"),
    "mse_loss": ("size_average", "reduce", "reduction"),
    "l1_loss": ("size_average", "reduce", "reduction"),
    "smooth_l1_loss": ("size_average", "reduce", "reduction", "beta"),
    "huber_loss": ("reduction", "delta"),
}
"""Loss functions and the positional names after input and target."""


def attach(patches: Patches) -> None:
    """Watches losses for as long as the patches are in place."""
    counts: Counter[tuple[str, Site]] = Counter()
    for name, positions in LOSSES.items():
        observe = _around(patches.trace, name, positions, counts)
        patches.around(functional, name, observe, rebind=True)


def _around(
    trace: Trace, name: str, positions: tuple[str, ...], counts: Counter[tuple[str, Site]]
) -> Any:
    nested = False

    def loss(original: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal nested
        if nested:
            return original(input, target, *args, **kwargs)
        nested = True
        try:
            output = original(input, target, *args, **kwargs)
        finally:
            nested = False
        if isinstance(input, torch.Tensor) and isinstance(target, torch.Tensor):
            options = dict(zip(positions, args, strict=False)) | kwargs
            trace.safely(_called, trace, name, input, target, options, output, counts)
        return output

    return loss


def _called(
    trace: Trace,
    name: str,
    input: torch.Tensor,
    target: torch.Tensor,
    options: dict[str, Any],
    output: torch.Tensor,
    counts: Counter[tuple[str, Site]],
) -> None:
    site = user_site(3)
    counts[name, site] += 1
    trace.emit(
        ev.LossCalled(
            seq=trace.tick(),
            site=site,
            name=name,
            input=input,
            target=target,
            options=options,
            output=output,
            grad_enabled=torch.is_grad_enabled(),
            call=counts[name, site],
        )
    )
