"""Observes optimizers: construction, `step`, `zero_grad`. Changes no gradient and no state."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE, user_site
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.state import OptimizerState, ParameterState
from surefoot.sanitizer.trace import Trace


def known(trace: Trace, optimizer: Optimizer) -> OptimizerState:
    """The state of an optimizer, made now if it was built before the audit began."""
    state = trace.optimizers.find(optimizer)
    if state is None:
        inner = _wrapped(optimizer)
        if inner is not None:
            return trace.optimizers.add(optimizer, known(trace, inner), keep=0)
        key = trace.optimizers.next_key()
        state = OptimizerState(optimizer, key, user_site(2), trace.tick())
        trace.optimizers.add(optimizer, state)
        trace.gradients.refresh(state)
        for parameter in state.parameters:
            tensor = parameter.ref()
            if tensor is not None and tensor.grad is not None:
                trace.gradients.observe([parameter])
        trace.emit(ev.OptimizerCreated(seq=state.created, site=state.site, optimizer=state))
    return state


def _wrapped(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer behind one that has no groups of its own, such as Accelerate's."""
    own = vars(optimizer)
    if "param_groups" in own:
        return None
    groups = optimizer.param_groups
    inner = (value for value in own.values() if isinstance(value, Optimizer))
    return next((value for value in inner if value.param_groups is groups), None)


def attach(patches: Patches) -> None:
    """Watches optimizers for as long as the patches are in place."""
    trace = patches.trace
    running: list[int] = []
    """Identities of the optimizers whose step runs, the outermost first."""

    def construct(original: Any, self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        trace.safely(known, trace, self)

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        closure = any(_computes(a) for a in (*args, kwargs.get("closure")))
        state = known(trace, optimizer)
        trace.gradients.refresh(state)
        trace.tick()
        trace.gradients.observe(state.parameters)
        inside = "backward" in trace.causes
        trace.emit(
            ev.StepBegin(
                seq=trace.seq,
                site=user_site(2),
                optimizer=state,
                closure=closure,
                inside_backward=inside,
            )
        )

    def step_within(optimizer: Optimizer) -> None:
        state = known(trace, optimizer)
        state.inner_steps += 1
        trace.close_window(state)

    def end(optimizer: Optimizer) -> None:
        state = known(trace, optimizer)
        trace.gradients.observe(state.parameters)
        trace.tick()
        site = user_site(2)
        record = trace.record_update(state, site)
        trace.emit(ev.StepEnd(seq=trace.seq, site=site, optimizer=state, update=record))

    def pre(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in running:
            # No optimizer steps within its own step: the one before was ended by an error.
            running.clear()
            if "step" in trace.causes:
                trace.causes.remove("step")
        running.append(id(optimizer))
        if len(running) == 1:
            # The optimizer itself is the first positional argument that the hook receives.
            trace.safely(begin, optimizer, args[1:] if args else (), kwargs)
            trace.causes.append("step")
        else:
            trace.safely(step_within, optimizer)

    def post(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if running:
            running.pop()
        if not running:
            trace.safely(end, optimizer)
            if trace.causes and trace.causes[-1] == "step":
                trace.causes.pop()
            if trace.active:
                trace.finish_update()

    patches.around(Optimizer, "__init__", construct)
    patches.around(Optimizer, "zero_grad", _zero_optimizer(trace))
    patches.around(nn.Module, "zero_grad", _zero_module(trace))
    for handle in (register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)):
        patches.on_restore(handle.remove)


def _computes(closure: Any) -> bool:
    """Whether a closure computes gradients; Lightning hands one that does nothing to each step."""
    while isinstance(closure, functools.partial):
        closure = closure.args[-1] if closure.args else closure.func
    return closure is not None and getattr(closure, "__name__", "") != "do_nothing_closure"


def _zero_optimizer(trace: Trace) -> Any:
    def zero(original: Any, self: Optimizer, *args: Any, **kwargs: Any) -> None:
        state = trace.safely(known, trace, self)
        _zero(trace, original, (self, *args), kwargs, [] if state is None else state.parameters)

    return zero


def _zero_module(trace: Trace) -> Any:
    def zero(original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> None:
        states = trace.safely(_tracked, trace, self) or []
        _zero(trace, original, (self, *args), kwargs, states)

    return zero


def _tracked(trace: Trace, module: nn.Module) -> list[ParameterState]:
    found = (trace.parameters.find(tensor) for tensor in parameters_of(module))
    return [state for state in found if state is not None]


def _zero(
    trace: Trace, original: Any, args: Any, kwargs: Any, states: list[ParameterState]
) -> None:
    lost = trace.safely(_before_zero, trace, states) or []
    trace.causes.append("zero")
    try:
        original(*args, **kwargs)
        trace.safely(_after_zero, trace, states, lost)
    finally:
        trace.causes.pop()


def _before_zero(trace: Trace, states: list[ParameterState]) -> list[OptimizerState]:
    """The optimizers with gradients that nobody has used, which are lost now."""
    trace.gradients.observe(states)
    keys = {state.key for state in states if state.grad_id}
    touched = [
        optimizer
        for optimizer in trace.optimizers
        if optimizer.window and any(s.key in keys for s in optimizer.parameters)
    ]
    for optimizer in touched:
        # What another optimizer has used is no window of this one any more.
        if not optimizer.has_unused and not optimizer.cleared:
            trace.settle(optimizer, NOWHERE)
    return [optimizer for optimizer in touched if optimizer.has_unused]


def _after_zero(trace: Trace, states: list[ParameterState], lost: list[OptimizerState]) -> None:
    trace.gradients.observe(states)
    for state in states:
        state.contributions = state.used = 0
        state.scale_pending = state.unknown = False
    trace.tick()
    site = user_site(3)
    inside = "step" in trace.causes
    event = ev.ZeroGrad(seq=trace.seq, site=site, parameters=states, inside_step=inside)
    # Rules see the window as it was; only then it is marked as wiped.
    trace.emit(event)
    for optimizer in lost:
        if optimizer.window:
            optimizer.wipes += 1
            optimizer.wipe_site = site
            optimizer.cleared = True
