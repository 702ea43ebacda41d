"""The event log: what happened to a run, written down at once; and the list of event kinds.

It only ever appends, over every resume, so that the history of a run stays whole. It never
interprets.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from surefoot.core.disk import is_full
from surefoot.core.errors import SurefootError
from surefoot.core.reports import EvalReport, Event, StepReport
from surefoot.observe.files.atomic import PartialWriteError, write_all
from surefoot.observe.files.log_file import restore_log_file
from surefoot.observe.metrics_log import MOST_WAITING_BYTES, strict


class EventKind(StrEnum):
    """Kinds of events. `start` and `resume` begin a stretch of a run; the next three end one."""

    START = "start"
    RESUME = "resume"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Stopped on request, saved, can be resumed."""
    FAILURE = "failure"
    SAVE = "save"
    SAVE_PAUSED = "save-paused"
    """The disk is full or fails: the run goes on without a checkpoint."""
    SKIP = "skip"
    """An update was skipped by the guard."""
    NON_FINITE = "non-finite"
    """An update that was not finite ends the run."""
    SPIKE = "spike"
    """The loss or the gradient norm stands far out of those before."""
    ROLL_BACK = "roll-back"
    """The run went back behind a spike, and leaves windows of data out."""
    BUDGET = "budget"
    """The budget of the contract is spent: the run saves and stops."""
    LEDGER = "ledger"
    """Where the time of the process went that ends now."""
    EARLY_STOP = "early-stop"
    OBSERVER_FAILED = "observer-failed"
    NOTE = "note"
    UNREADABLE = "unreadable"
    """Not written, only read: a line that a kill has torn."""


BEGINNINGS = frozenset({EventKind.START, EventKind.RESUME})
ENDS = frozenset({EventKind.FINISHED, EventKind.STOPPED, EventKind.FAILURE})


class EventLog:
    """Appends events to `path`; each is on the disk when `on_event` returns.

    Args:
        path: the log; made if it is missing.
        patient: whether events wait in memory, for the next one, while the disk is full.

    Raises:
        SurefootError: an event cannot be written.
    """

    def __init__(self, path: Path, *, patient: bool = False) -> None:
        self.path = path
        self._patient = patient
        self._waiting = b""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            # A kill tore the last line. It stays, as a line of its own, and is read as unreadable.
            write_all(self._descriptor, b"\n")
        self._size = os.fstat(self._descriptor).st_size

    def on_event(self, event: Event) -> None:
        # A disk that refuses here is told of by the write itself.
        with suppress(OSError):
            found = restore_log_file(self.path, self._descriptor, self._size)
            if found is not None:
                self._descriptor, self._size = found.descriptor, found.size
                if found.told:
                    self._waiting += _line(Event(EventKind.NOTE, event.step, found.told, {}))
        self._waiting += _line(event)
        try:
            self._write()
        except OSError as error:
            if self._patient and is_full(error) and len(self._waiting) < MOST_WAITING_BYTES:
                return
            raise self._unwritable(error) from error

    def _write(self) -> None:
        try:
            write_all(self._descriptor, self._waiting)
        except PartialWriteError as error:
            # The rest of the cut line goes on where the file ends.
            self._waiting = self._waiting[error.written :]
            self._size += error.written
            raise
        self._waiting = b""
        self._size = os.fstat(self._descriptor).st_size
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            # What an fsync refuses may be lost: not an error to wait out.
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> SurefootError:
        return SurefootError(
            f"The event log cannot be written: {error.strerror}.",
            where=str(self.path),
            rule="what happens to a run is written down",
            remedy="free some space, then resume the run from its last checkpoint",
        )

    def on_step(self, report: StepReport) -> None:
        """Updates stand in the metrics log."""

    def on_eval(self, report: EvalReport) -> None:
        """Evaluations stand in the metrics log."""

    def close(self) -> None:
        """Writes what waits and closes; harmless when called twice."""
        if self._descriptor < 0:
            return
        try:
            if self._waiting:
                self._write()
        except OSError as error:
            if self._patient:
                # Nobody has been told yet.
                raise self._unwritable(error) from error
        finally:
            os.close(self._descriptor)
            self._descriptor = -1


def _line(event: Event) -> bytes:
    fields = {
        "kind": str(event.kind),
        "step": event.step,
        "message": event.message,
        "data": event.data,
        "time": event.time or time.time(),
    }
    line = json.dumps(strict(fields), allow_nan=False, ensure_ascii=False, default=repr) + "\n"
    return line.encode("utf-8", "backslashreplace")


def failure_event(error: BaseException, step: int) -> Event:
    """The event of a run that failed, with type, message, fields and traceback of the error."""
    data: dict[str, object] = {
        "type": type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, SurefootError):
        data |= {"where": error.where, "rule": error.rule, "remedy": error.remedy}
    first_line = str(error).partition("\n")[0]
    message = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    return Event(EventKind.FAILURE, step, message, data, time.time())


def read_events(path: str | Path) -> Iterator[Event]:
    """The events of a log, first to last; a torn line comes as an event of kind `unreadable`."""
    with open(path, "rb") as file:
        for line in file:
            try:
                fields = json.loads(line)
                event = Event(
                    kind=str(fields["kind"]),
                    step=int(fields["step"]),
                    message=str(fields["message"]),
                    data=dict(fields["data"]),
                    time=float(fields["time"]),
                )
            except (ValueError, KeyError, TypeError):
                event = Event(EventKind.UNREADABLE, 0, line.decode("utf-8", "replace").rstrip("\n"))
            yield event
