"""The in-use lock of a run folder: one process owns it, a second is told who does.

The kernel holds the lock, not the file's text: it is free the moment its owner ends, however it
ends, so a lock is never stale and never needs deleting. It never waits longer than a blink.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from surefoot.core.errors import RunFolderError

LOCK_NAME = ".lock"
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a run folder."""

    host: str
    pid: int
    started: float
    """Unix time at which the owner took the folder."""

    @classmethod
    def here(cls) -> Owner:
        return cls(host=socket.gethostname(), pid=os.getpid(), started=time.time())

    def __str__(self) -> str:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} on {self.host}, since {started}"


class FolderLock:
    """Exclusive ownership of a folder for as long as this process lives or until `release()`.

    Raises:
        RunFolderError: another process owns the folder; it is named.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self.owner = Owner.here()
        self._descriptor = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
            self._take(folder)
        except OSError as error:
            self.release()
            raise RunFolderError(
                f"The run folder cannot be locked: {error.strerror}.",
                where=str(self.path),
                rule="a run folder lies on a disk that can be written to and knows file locks",
            ) from error
        except BaseException:
            self.release()
            raise
        _held.add(self)

    def _take(self, folder: Path) -> None:
        # A listing of runs may probe the lock for some microseconds: try again before refusing.
        deadline = time.monotonic() + _RETRY_SECONDS
        while not _try_lock(self._descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                owner = read_owner(folder)
                raise RunFolderError(
                    f"The run folder is in use by {owner or 'a process that left no name'}.",
                    where=str(folder),
                    rule="one process writes to a run folder at a time",
                    remedy="wait for that run to end, stop it, or start a new run",
                )
            time.sleep(0.02)
        text = json.dumps(asdict(self.owner)).encode("utf-8")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    def release(self) -> None:
        """Gives the folder back; harmless when called twice."""
        _held.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_owner(folder: Path) -> Owner | None:
    """The last process that took the folder, alive or not; None where none is readable."""
    try:
        fields = json.loads((folder / LOCK_NAME).read_text("utf-8"))
        return Owner(host=fields["host"], pid=fields["pid"], started=fields["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_in_use(folder: Path) -> bool:
    """Whether a living process owns the folder."""
    path = folder / LOCK_NAME
    if not path.exists():
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A forked data worker inherits the descriptor, and with it the lock: it would keep the folder
    # of a killed run in use. Closing the child's copy leaves the parent's lock as it is.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
