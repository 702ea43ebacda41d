"""The probe: attaches to torch, reports to a trace, and takes everything back.

It never changes a number: it draws from no random stream, writes to no tensor and runs no graph.
"""

from __future__ import annotations

from types import TracebackType

from surefoot.sanitizer.probe import (
    backward,
    clip,
    data,
    distributed,
    io,
    losses,
    modules,
    optimizers,
    rng,
    scaler,
    schedulers,
    syncs,
)
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.trace import Trace

PARTS = (
    optimizers,
    schedulers,
    scaler,
    clip,
    backward,
    modules,
    losses,
    data,
    io,
    rng,
    distributed,
    syncs,
)


class Probe:
    """One attachment; a context manager."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._patches = Patches(trace)

    def attach(self) -> None:
        try:
            for part in PARTS:
                part.attach(self._patches)
        except BaseException:
            self._patches.restore()
            raise
        self.trace.active = True

    def detach(self) -> None:
        self.trace.active = False
        self._patches.restore()

    def __enter__(self) -> Probe:
        self.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()
