"""The time ledger: the host's time in phases that exclude each other and sum to the wall time.

Reads the host's clock only: while the host runs ahead of a device, time counts for what the host
does. Never synchronizes with a device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType

from surefoot.observe.files.atomic import atomic_write

TIME_LEDGER_NAME = "time-ledger.json"
"""File name, below the artifacts of a run."""


class Phase(IntEnum):
    """What the host is doing; everything else is `REST`."""

    REST = 0
    DATA_WAIT = 1
    """Waiting for the loader."""
    LAUNCH = 2
    """Queueing work for the device; on CPU, the work itself."""
    DEVICE_WAIT = 3
    """Waiting for values from the device."""
    EVALUATION = 4
    CHECKPOINT = 5
    LOGGING = 6
    COMPILE = 7

    @property
    def label(self) -> str:
        """Name for display and for the record."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class LedgerReading:
    """Nanoseconds of each phase; they sum to `wall_nanoseconds` exactly."""

    nanoseconds: Mapping[Phase, int]
    wall_nanoseconds: int

    def since(self, earlier: LedgerReading) -> LedgerReading:
        """Time spent between an earlier reading and this one."""
        spent = {
            phase: count - earlier.nanoseconds[phase] for phase, count in self.nanoseconds.items()
        }
        return LedgerReading(spent, self.wall_nanoseconds - earlier.wall_nanoseconds)

    def as_json(self) -> dict[str, float]:
        """Seconds by phase label, and `wall`."""
        seconds = {phase.label: count / 1e9 for phase, count in self.nanoseconds.items()}
        return seconds | {"wall": self.wall_nanoseconds / 1e9}


class TimeLedger:
    """Counts the host's time from construction on. One thread switches phases.

    `with ledger.phase(Phase.EVALUATION): ...` restores the previous phase at its end;
    `ledger.switch(Phase.LAUNCH)` sets the phase and returns the previous one.
    """

    def __init__(self) -> None:
        counts = self._nanoseconds = [0] * len(Phase)
        clock = perf_counter_ns
        self._began = since = clock()
        current = Phase.REST

        def switch(phase: Phase) -> Phase:
            nonlocal current, since
            now = clock()
            counts[current] += now - since
            since = now
            before, current = current, phase
            return before

        self.switch = switch
        self._now: Callable[[], int] = lambda: (switch(current), since)[1]
        self._scopes = tuple(PhaseScope(self, phase) for phase in Phase)

    def shift(self, source: Phase, target: Phase, seconds: float) -> None:
        """Moves time from `source` to `target`; at most what `source` has."""
        count = min(round(seconds * 1e9), self._nanoseconds[source])
        self._nanoseconds[source] -= count
        self._nanoseconds[target] += count

    def phase(self, phase: Phase) -> PhaseScope:
        """A context manager that counts its time as `phase`; the same object each time."""
        return self._scopes[phase]

    def read(self) -> LedgerReading:
        """The time spent so far."""
        now = self._now()
        counts = {phase: self._nanoseconds[phase] for phase in Phase}
        return LedgerReading(counts, now - self._began)


class PhaseScope:
    """Context manager for one phase of a ledger; created by `TimeLedger.phase`."""

    __slots__ = ("_before", "_ledger", "_phase")

    def __init__(self, ledger: TimeLedger, phase: Phase) -> None:
        self._ledger = ledger
        self._phase = phase
        self._before: list[Phase] = []

    def __enter__(self) -> None:
        self._before.append(self._ledger.switch(self._phase))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ledger.switch(self._before.pop())


def add_stretch(path: Path, stretch: Mapping[str, object]) -> None:
    """Adds one attempt of a run to `time-ledger.json`, replacing an entry of the same attempt.

    Args:
        path: the file; created if missing.
        stretch: `attempt`, `first_step`, `last_step`, `host_seconds` (the phases and `wall`) and
            `device_milliseconds` (the phases of a sampled update, or null).
    """
    stretches: list[object] = []
    if path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))["stretches"]
        stretches = [s for s in held if s["attempt"] != stretch["attempt"]]
    content = {"format": 1, "stretches": [*stretches, dict(stretch)]}
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, json.dumps(content, indent=1) + "\n")
