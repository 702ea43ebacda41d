"""Observes DistributedDataParallel and collectives. Starts no communication."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import user_site
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.trace import Trace

COLLECTIVES = ("all_reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor")


def attach(patches: Patches) -> None:
    """Watches distributed for as long as the patches are in place."""
    if not dist.is_available():
        return
    trace = patches.trace

    def construct(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        trace.safely(_wrapped, trace, self)

    patches.around(DistributedDataParallel, "__init__", construct)
    for name in COLLECTIVES:
        if hasattr(dist, name):
            patches.around(dist, name, _collective(trace, name), rebind=True)


def _wrapped(trace: Trace, wrapper: Any) -> None:
    trace.know_root(wrapper.module)
    trace.emit(ev.ParallelWrapped(seq=trace.tick(), site=user_site(3), wrapper=wrapper))


def _collective(trace: Trace, name: str) -> Any:
    def collective(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Gradients averaged by hand are changed here, not "by the user".
        trace.causes.append("collective")
        try:
            result = original(tensor, *args, **kwargs)
        finally:
            trace.causes.pop()
        trace.safely(_ran, trace, name, tensor)
        return result

    return collective


def _ran(trace: Trace, name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        return
    identity = id(tensor)
    on_gradient = any(s.grad_id == identity for s in trace.all_parameters())
    trace.emit(
        ev.Collective(seq=trace.tick(), site=user_site(3), name=name, on_gradient=on_gradient)
    )
