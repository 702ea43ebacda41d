"""How the time of one process of a run was spent, from the start of its training."""

from __future__ import annotations

from surefoot.assembly.run_parts import Assembly
from surefoot.engine.reporting import ReportLog
from surefoot.observe.events import EventKind
from surefoot.observe.time_ledger import TIME_LEDGER_NAME, LedgerReading, Phase, add_stretch
from surefoot.run.folder_roles import Folder
from surefoot.run.journal import Journal

MOST_NAMED = 3
"""Phases that the event names."""


class TimeAccount:
    """Measures from its construction on."""

    def __init__(self, assembly: Assembly, log: ReportLog) -> None:
        self._device_milliseconds = assembly.trainable.passing.device_milliseconds
        self._log = log
        self._began = self._read()

    def write(self, folder: Folder, journal: Journal) -> None:
        """Writes the time spent until now, by phase, to an event and a file."""
        (began, first_step), (now, last_step) = self._began, self._read()
        seconds = now.since(began).as_json()
        stretch = {
            "attempt": folder.attempt,
            "first_step": first_step,
            "last_step": last_step,
            "host_seconds": {name: round(value, 6) for name, value in seconds.items()},
            "device_milliseconds": self._device_milliseconds(),
        }
        folder.on_owner(lambda own: add_stretch(own.artifacts_path / TIME_LEDGER_NAME, stretch))
        wall = seconds.pop("wall")
        most = sorted(seconds.items(), key=lambda item: -item[1])[:MOST_NAMED]
        shares = ", ".join(f"{value / wall:.0%} {name}" for name, value in most if wall)
        journal.tell(EventKind.LEDGER, f"{wall:.1f} s of this process: {shares}", stretch)

    def _read(self) -> tuple[LedgerReading, int]:
        self._log.ledger.switch(Phase.REST)
        self._log.book_times()
        return self._log.ledger.read(), self._log.progress.step
