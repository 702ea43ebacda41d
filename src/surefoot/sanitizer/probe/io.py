"""Observes saving, loading, `state_dict` and `load_state_dict`. Touches no file itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.trace import Trace


def attach(patches: Patches) -> None:
    """Watches io for as long as the patches are in place."""
    trace = patches.trace

    def save(original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(obj, f, *args, **kwargs)
        trace.safely(_saved, trace, obj)
        return result

    def load(original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(f, *args, **kwargs)
        trace.safely(_loaded, trace, result)
        return result

    for name, function in (("save", save), ("load", load)):
        patches.around(torch, name, function, rebind=True)
        patches.around(torch.serialization, name, function)
    schedulers = [
        kind
        for kind in vars(lr_scheduler).values()
        if isinstance(kind, type) and issubclass(kind, LRScheduler)
    ]
    owners = [(nn.Module, "module"), (Optimizer, "optimizer"), (GradScaler, "scaler")]
    for owner, kind in [*owners, *((scheduler, "scheduler") for scheduler in schedulers)]:
        patches.around(owner, "load_state_dict", _method(trace, kind, ev.StateRestored))
        patches.around(owner, "state_dict", _method(trace, kind, ev.StateTaken))


def _method(trace: Trace, kind: str, event: Any) -> Any:
    depth = 0

    def method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            trace.safely(_report, trace, event, kind, self)
        return result

    return method


def _report(trace: Trace, event: Any, kind: str, owner: Any) -> None:
    trace.emit(event(**trace.here(), kind=kind, owner=owner))


def _saved(trace: Trace, contents: Any) -> None:
    trace.emit(ev.Saved(**trace.here(), contents=contents))


def _loaded(trace: Trace, contents: Any) -> None:
    trace.emit(ev.Loaded(**trace.here(), contents=contents))
