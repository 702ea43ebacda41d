"""The event log: what happens to a run, written immediately; and the list of event kinds.

Append-only over every resume, so that the history of a run stays complete. Interprets nothing.
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
from surefoot.core.reports import Event, Observer
from surefoot.observe.files.atomic import PartialWriteError, write_all
from surefoot.observe.files.log_file import restore_log_file
from surefoot.observe.metrics_log import MAX_WAITING_BYTES, strict


class EventKind(StrEnum):
    """Kinds of events. `start` and `resume` begin an attempt of a run; the next three end one."""

    START = "start"
    RESUME = "resume"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Stopped on request, saved, can be resumed."""
    FAILURE = "failure"
    SAVE = "save"
    SAVE_PAUSED = "save-paused"
    """The disk is full or fails: the run continues without a checkpoint."""
    SKIP = "skip"
    """An update was skipped by the guard."""
    NON_FINITE = "non-finite"
    """A non-finite update ended the run."""
    SPIKE = "spike"
    """The loss or the gradient norm is far outside its recent range."""
    ROLL_BACK = "roll-back"
    """The run returned to a checkpoint before a spike, and skips windows of data."""
    BUDGET = "budget"
    """A budget of the contract is spent: the run saves and stops."""
    LEDGER = "ledger"
    """Where the time of this process went; written at its end."""
    EARLY_STOP = "early-stop"
    OBSERVER_FAILED = "observer-failed"
    NOTE = "note"
    UNREADABLE = "unreadable"
    """Never written, only read: a line torn by a kill."""


BEGINNINGS = frozenset({EventKind.START, EventKind.RESUME})
ENDS = frozenset({EventKind.FINISHED, EventKind.STOPPED, EventKind.FAILURE})


class EventLog(Observer):
    """Appends events to `path`; each is on disk when `on_event` returns.

    Args:
        path: the log; created if missing.
        patient: whether events wait in memory while the disk is full, until the next one.

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
            # A kill tore the last line. It stays as a line of its own, and is read as unreadable.
            write_all(self._descriptor, b"\n")
        self._size = os.fstat(self._descriptor).st_size

    def on_event(self, event: Event) -> None:
        # A disk error here is raised by the write itself.
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
            if self._patient and is_full(error) and len(self._waiting) < MAX_WAITING_BYTES:
                return
            raise self._unwritable(error) from error

    def _write(self) -> None:
        try:
            write_all(self._descriptor, self._waiting)
        except PartialWriteError as error:
            # The rest of a partly written line continues where the file ends.
            self._waiting = self._waiting[error.written :]
            self._size += error.written
            raise
        self._waiting = b""
        self._size = os.fstat(self._descriptor).st_size
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            # What a failed fsync refused may be lost: no retry can make it good.
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> SurefootError:
        return SurefootError(
            f"The event log cannot be written: {error.strerror}.",
            where=str(self.path),
            rule="every event of a run is recorded",
            remedy="free some space, then resume the run from its last checkpoint",
        )

    def close(self) -> None:
        """Writes waiting events and closes; idempotent."""
        if self._descriptor < 0:
            return
        try:
            if self._waiting:
                self._write()
        except OSError as error:
            if self._patient:
                # Not reported anywhere yet.
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
    """The events of a log in order; a torn line becomes an event of kind `unreadable`."""
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
