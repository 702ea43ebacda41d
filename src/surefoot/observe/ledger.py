"""The time ledger: where the host's time goes, in phases that exclude each other and sum to the
whole.

It reads the host's clock only: time in which a device works while the host runs ahead belongs to
what the host does meanwhile. It never synchronises with a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter_ns
from types import TracebackType


class Phase(IntEnum):
    """What the host is doing. Whatever is not named is `REST`."""

    REST = 0
    DATA_WAIT = 1
    """Waiting for the loader."""
    LAUNCH = 2
    """Queueing work for the device; on CPU, the work itself."""
    DEVICE_WAIT = 3
    """Waiting for numbers of the device."""
    EVALUATION = 4
    CHECKPOINT = 5
    LOGGING = 6
    COMPILE = 7

    @property
    def label(self) -> str:
        """Name for people and for the record."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class LedgerReading:
    """Nanoseconds of each phase; they sum to `wall_nanoseconds` exactly."""

    nanoseconds: Mapping[Phase, int]
    wall_nanoseconds: int

    def since(self, earlier: LedgerReading) -> LedgerReading:
        """What was spent between an earlier reading and this one."""
        spent = {
            phase: count - earlier.nanoseconds[phase] for phase, count in self.nanoseconds.items()
        }
        return LedgerReading(spent, self.wall_nanoseconds - earlier.wall_nanoseconds)

    def as_json(self) -> dict[str, float]:
        """Seconds by the label of each phase, and `wall`."""
        seconds = {phase.label: count / 1e9 for phase, count in self.nanoseconds.items()}
        return seconds | {"wall": self.wall_nanoseconds / 1e9}


class TimeLedger:
    """Counts the host's time from its making on. One thread switches phases.

    `with ledger.phase(Phase.DATA_WAIT): ...` or, in a hot loop, keep `ledger.phase(...)` and enter
    it again and again. An inner phase stops the clock of the outer one.
    """

    def __init__(self) -> None:
        self._nanoseconds = [0] * len(Phase)
        self._stack: list[int] = []
        self._current = 0
        self._scopes = tuple(PhaseScope(self, phase.value) for phase in Phase)
        self._since = self._began = perf_counter_ns()

    def phase(self, phase: Phase) -> PhaseScope:
        """A context manager that counts its time as `phase`; the same object each time."""
        return self._scopes[phase]

    def read(self) -> LedgerReading:
        """The time spent until now."""
        now = perf_counter_ns()
        self._nanoseconds[self._current] += now - self._since
        self._since = now
        counts = {phase: self._nanoseconds[phase] for phase in Phase}
        return LedgerReading(counts, now - self._began)


class PhaseScope:
    """One phase of one ledger, to be entered; made by `TimeLedger.phase`."""

    __slots__ = ("_index", "_ledger")

    def __init__(self, ledger: TimeLedger, index: int) -> None:
        self._ledger = ledger
        self._index = index

    def __enter__(self) -> None:
        ledger = self._ledger
        now = perf_counter_ns()
        ledger._nanoseconds[ledger._current] += now - ledger._since
        ledger._since = now
        ledger._stack.append(ledger._current)
        ledger._current = self._index

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ledger = self._ledger
        now = perf_counter_ns()
        ledger._nanoseconds[ledger._current] += now - ledger._since
        ledger._since = now
        ledger._current = ledger._stack.pop()
