"""Sends the reports and events of a run to its logs and to every other observer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from surefoot.core.reports import Event, Observer
from surefoot.observe.events import EventKind, failure_event
from surefoot.observe.latest import LatestMetrics
from surefoot.observe.observers import Observers
from surefoot.run.folder_roles import Folder, MeasuredRun
from surefoot.state.run_state import Progress


class Journal:
    """The logs of a run, its latest metrics and its observers, as one.

    Args:
        folder: of the run.
        measured: what the columns of resources are measured on.
        progress: whose step stands in each event.
        observers: further observers; one that fails never stops the run.
        patient: whether rows and events wait in memory while the disk is full.
    """

    def __init__(
        self,
        folder: Folder,
        measured: MeasuredRun,
        progress: Progress,
        observers: Sequence[Observer] = (),
        *,
        patient: bool = False,
    ) -> None:
        self.latest = LatestMetrics()
        self.logs = folder.open_logs(measured, self.note, patient=patient)
        self.observers = Observers((*self.logs.observers, self.latest), observers)
        self._progress = progress

    def tell(self, kind: str, message: str, data: Mapping[str, object]) -> None:
        """Records an event at the current step."""
        self.observers.on_event(Event(kind, self._progress.step, message, data, time.time()))

    def note(self, text: str) -> None:
        """Records a remark."""
        self.tell(EventKind.NOTE, text, {})

    def failure(self, error: BaseException) -> None:
        """Records what made the run fail, with its traceback."""
        self.observers.on_event(failure_event(error, self._progress.step))

    def close(self) -> None:
        """Closes every observer and every log.

        Raises:
            SurefootError: what a log still held cannot be written.
        """
        try:
            self.observers.close()
        finally:
            self.logs.close()
