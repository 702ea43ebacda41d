"""Observes gradient scalers. Asks for no scale that is not on the CPU already."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.probe.optimizers import known
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.state import OptimizerState, ScalerState
from surefoot.sanitizer.trace import Trace


def _state(trace: Trace, scaler: GradScaler) -> ScalerState:
    state = trace.scalers.find(scaler)
    if state is None:
        state = ScalerState(scaler, trace.scalers.next_key())
        trace.scalers.add(scaler, state)
    return state


def attach(patches: Patches) -> None:
    """Watches scaler for as long as the patches are in place."""
    trace = patches.trace

    def scale(original: Any, self: GradScaler, outputs: Any) -> Any:
        result = original(self, outputs)
        if self.is_enabled():
            trace.safely(_scaled, trace, self, result)
        return result

    def unscale(original: Any, self: GradScaler, optimizer: Any) -> None:
        if not self.is_enabled():
            original(self, optimizer)
            return
        state = trace.safely(known, trace, optimizer)
        if state is not None:
            trace.safely(trace.gradients.observe, state.parameters)
        trace.causes.append("unscale")
        try:
            original(self, optimizer)
            trace.safely(_unscaled, trace, state)
        finally:
            trace.causes.pop()

    def step(original: Any, self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        state = trace.safely(known, trace, optimizer)
        before = 0 if state is None else state.steps
        trace.causes.append("scaler")
        try:
            result = original(self, optimizer, *args, **kwargs)
            trace.safely(_stepped, trace, self, state, before)
        finally:
            trace.causes.pop()
        return result

    patches.around(GradScaler, "scale", scale)
    patches.around(GradScaler, "unscale_", unscale)
    patches.around(GradScaler, "step", step)


def _scaled(trace: Trace, scaler: GradScaler, result: Any) -> None:
    state = _state(trace, scaler)
    state.scale = graph.number(scaler._scale)
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            graph.notes_of(tensor.grad_fn)[graph.SCALE_MARK] = state.key


def _unscaled(trace: Trace, optimizer: OptimizerState | None) -> None:
    if optimizer is not None:
        trace.gradients.observe(optimizer.parameters)
        for parameter in optimizer.parameters:
            parameter.scale_pending = False


def _stepped(trace: Trace, scaler: GradScaler, optimizer: Any, before: int) -> None:
    state = _state(trace, scaler)
    stepped = optimizer is None or optimizer.steps > before
    state.steps += 1
    if not stepped:
        optimizer.skipped += 1
        trace.close_window(optimizer)
        for parameter in optimizer.parameters:
            parameter.used = parameter.contributions
            parameter.touched = False
    trace.emit(ev.ScalerStepped(**trace.here(), scaler=state, optimizer=optimizer, stepped=stepped))
