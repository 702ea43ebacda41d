"""Observes gradient scalers. Asks for no scale that is not on the CPU already."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.frames import user_site
from surefoot.sanitizer.probe.optimizers import known
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.state import ScalerState
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
            return original(self, optimizer)
        state = trace.safely(known, trace, optimizer)
        if state is not None:
            trace.safely(trace.observe_gradients, state.parameters)
        trace.causes.append("unscale")
        try:
            original(self, optimizer)
            trace.safely(_unscaled, trace, self, state)
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

    def update(original: Any, self: GradScaler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_enabled():
            trace.safely(_updated, trace, self)

    patches.around(GradScaler, "scale", scale)
    patches.around(GradScaler, "unscale_", unscale)
    patches.around(GradScaler, "step", step)
    patches.around(GradScaler, "update", update)


def _scaled(trace: Trace, scaler: GradScaler, result: Any) -> None:
    state = _state(trace, scaler)
    state.scaled += 1
    state.scale = graph.number(scaler._scale)
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            graph.notes_of(tensor.grad_fn)[graph.SCALE_MARK] = state.key
    trace.emit(ev.LossScaled(seq=trace.tick(), site=user_site(3), scaler=state))


def _unscaled(trace: Trace, scaler: GradScaler, optimizer: Any) -> None:
    if optimizer is not None:
        trace.observe_gradients(optimizer.parameters)
        optimizer.unscaled = True
        for parameter in optimizer.parameters:
            parameter.scale_pending = False
    state = _state(trace, scaler)
    trace.emit(ev.Unscaled(seq=trace.tick(), site=user_site(3), scaler=state, optimizer=optimizer))


def _stepped(trace: Trace, scaler: GradScaler, optimizer: Any, before: int) -> None:
    state = _state(trace, scaler)
    stepped = optimizer is None or optimizer.steps > before
    state.steps += 1
    if stepped:
        state.skip_run = 0
    else:
        state.skipped += 1
        state.skip_run += 1
        if optimizer is not None:
            optimizer.skipped += 1
            trace.close_window(optimizer)
            for parameter in optimizer.parameters:
                parameter.used = parameter.contributions
                parameter.touched = False
    if optimizer is not None:
        optimizer.scaler = state
    trace.emit(
        ev.ScalerStepped(
            seq=trace.tick(),
            site=user_site(3),
            scaler=state,
            optimizer=optimizer,
            stepped=stepped,
        )
    )


def _updated(trace: Trace, scaler: GradScaler) -> None:
    state = _state(trace, scaler)
    trace.emit(ev.ScalerUpdated(seq=trace.tick(), site=user_site(3), scaler=state))
