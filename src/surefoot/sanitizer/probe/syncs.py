"""Observes that the user's own lines make the host wait for a device.

Attached only where a device other than the CPU exists: on a CPU nothing waits.
"""

from __future__ import annotations

from typing import Any

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import called_by_user
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.trace import Trace

METHODS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")


def attach(patches: Patches) -> None:
    """Watches syncs for as long as the patches are in place."""
    if not torch.accelerator.is_available():
        return
    for name in METHODS:
        if hasattr(torch.Tensor, name):
            patches.set(torch.Tensor, name, _around(patches.trace, name))


def _around(trace: Trace, name: str) -> Any:
    original = getattr(torch.Tensor, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if trace.active and self.device.type != "cpu" and called_by_user(2):
            trace.safely(_waited, trace, name)
        return original(self, *args, **kwargs)

    return method


def _waited(trace: Trace, name: str) -> None:
    trace.emit(ev.Synchronised(**trace.here(), how=name))
