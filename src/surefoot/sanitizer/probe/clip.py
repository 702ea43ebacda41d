"""Observes gradient clipping. Uses the norm that the clip computed; computes none itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.state import ParameterState
from surefoot.sanitizer.trace import Trace


def attach(patches: Patches) -> None:
    """Watches clip for as long as the patches are in place."""
    for name, kind in (
        ("clip_grad_norm_", "norm"),
        ("clip_grad_value_", "value"),
        ("clip_grads_with_norm_", "norm"),
    ):
        for owner in (clip_grad, utils):
            patches.around(owner, name, _around(patches.trace, kind), rebind=owner is utils)


def _around(trace: Trace, kind: str) -> Any:
    def clip(
        original: Any, parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(parameters, torch.Tensor):
            # A generator can be read once: the clip and we read the same list.
            parameters = list(parameters)
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        states = trace.safely(_before, trace, tensors) or []
        trace.causes.append("clip")
        try:
            result = original(parameters, *args, **kwargs)
            limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value", 0.0))
            # The norm is what the call gives back, or what it was given.
            norm = result if result is not None else [*args, *kwargs.values(), None][1]
            trace.safely(_after, trace, kind, tensors, states, limit, norm)
        finally:
            trace.causes.pop()
        return result

    return clip


def _before(trace: Trace, tensors: list[torch.Tensor]) -> list[ParameterState]:
    found = [trace.parameters.find(tensor) for tensor in tensors]
    states = [state for state in found if state is not None]
    trace.gradients.observe(states)
    return states


def _after(
    trace: Trace,
    kind: str,
    tensors: list[torch.Tensor],
    states: list[ParameterState],
    limit: Any,
    norm: Any,
) -> None:
    trace.gradients.observe(states)
    trace.emit(
        ev.Clip(
            **trace.here(),
            kind=kind,
            limit=graph.number(limit) or 0.0,
            parameters=states,
            strangers=[t for t in tensors if trace.parameters.find(t) is None],
            norm=graph.number(norm) if kind == "norm" else None,
            inside_step="step" in trace.causes,
        )
    )
