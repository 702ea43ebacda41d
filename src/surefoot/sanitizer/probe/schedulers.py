"""Observes learning-rate schedulers. Reads rates, sets none."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import called_by_user, user_site
from surefoot.sanitizer.probe.optimizers import known
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.state import SchedulerState
from surefoot.sanitizer.trace import Trace


def _state(trace: Trace, scheduler: Any) -> SchedulerState:
    state = trace.schedulers.find(scheduler)
    if state is None:
        key = trace.schedulers.next_key()
        state = SchedulerState(scheduler, key, user_site(3), trace.tick())
        trace.schedulers.add(scheduler, state)
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None and hasattr(optimizer, "param_groups"):
            state.optimizer = known(trace, optimizer)
            state.optimizer_steps_at_creation = state.optimizer.steps
        for inner in getattr(scheduler, "_schedulers", ()):
            _state(trace, inner).inner = True
        trace.emit(ev.SchedulerCreated(seq=trace.seq, site=state.site, scheduler=state))
    return state


def attach(patches: Patches) -> None:
    """Watches schedulers for as long as the patches are in place."""
    trace = patches.trace
    depth = 0
    wrapped: set[type] = set()

    def construct(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal depth
        for kind in type(self).__mro__:
            wrap_step(kind)
        depth += 1
        try:
            original(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            trace.safely(_state, trace, self)

    def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth:
            return original(self, *args, **kwargs)
        before = trace.safely(_rates, trace, self) or ()
        by_user = called_by_user(3)
        depth += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            depth -= 1
        trace.safely(_stepped, trace, self, before, by_user)
        return result

    def wrap_step(kind: type) -> None:
        if kind in wrapped or not issubclass(kind, LRScheduler):
            return
        wrapped.add(kind)
        if "step" in vars(kind):
            patches.around(kind, "step", step)

    for kind in list(vars(lr_scheduler).values()):
        if isinstance(kind, type) and issubclass(kind, LRScheduler):
            wrap_step(kind)
            if "__init__" in vars(kind):
                patches.around(kind, "__init__", construct)


def _rates(trace: Trace, scheduler: Any) -> tuple[float, ...]:
    state = _state(trace, scheduler)
    return () if state.optimizer is None else state.optimizer.rates()


def _stepped(trace: Trace, scheduler: Any, before: tuple[float, ...], by_user: bool) -> None:
    state = _state(trace, scheduler)
    state.steps += 1
    state.last_site = user_site(3)
    trace.emit(
        ev.SchedulerStep(
            seq=trace.tick(),
            site=state.last_site,
            scheduler=state,
            before=before,
            after=() if state.optimizer is None else state.optimizer.rates(),
            by_user=by_user,
        )
    )
