"""The lease of a run folder: one process owns it; a second one is refused; a dead owner loses it.

Uses the kernel's file lock where the file system supports it: it is released the moment its owner
ends. The owner's name and heartbeat are stored beside it for file systems and machines where the
lock is not reliable. Never compares the clocks of two machines.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.core.errors import RunFolderError
from surefoot.observe.files import lock
from surefoot.observe.files.lock import LOCK_NAME, NO_LOCKS_HERE, Owner, read_owner

HEARTBEAT_NAME = ".heartbeat"
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Timing of a lease, in seconds."""

    beat_seconds: float = 5.0
    """Pause between two heartbeats."""
    silent_seconds: float = 60.0
    """An owner on another machine whose heartbeat does not change for this long is dead."""
    settle_seconds: float = 1.0
    """Without a kernel lock: time after which a concurrent taker would have written its name."""


TIMES = LeaseTimes()


class Lease:
    """Exclusive ownership of a folder while this process lives, or until `release()`.

    Taking over from an owner on another machine that did not release takes `silent_seconds`.

    Args:
        folder: the run folder; must exist.
        times: the timing.
        tell: called with a message before a long wait.

    Raises:
        RunFolderError: another process owns the folder; names it.
    """

    def __init__(
        self,
        folder: Path,
        times: LeaseTimes = TIMES,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.folder = folder
        self.path = folder / LOCK_NAME
        self.owner = Owner.here()
        self._times = times
        self._descriptor = -1
        self._done = threading.Event()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
            self._take(tell)
            self._beat(0)
        except OSError as error:
            self._let_go()
            raise RunFolderError(
                f"The run folder cannot be locked: {error.strerror}.",
                where=str(self.path),
                rule="a run folder is on a writable disk",
            ) from error
        except BaseException:
            self._let_go()
            raise
        _held.add(self)
        self._thread = threading.Thread(
            target=_keep_beating, args=(weakref.ref(self), self._done, times), daemon=True
        )
        self._thread.start()

    @property
    def attempt(self) -> str:
        """Unique name of this period of ownership."""
        return self.owner.attempt

    def still_owner(self) -> bool:
        """Whether no other process has taken the folder since; ask before publishing anything.

        Also in a process that this one has forked to write for it.
        """
        return owns(self.folder, self.attempt)

    def release(self) -> None:
        """Releases the folder; idempotent."""
        if self._descriptor < 0:
            return
        if self.owner.pid == os.getpid() and self.still_owner():
            os.pwrite(self._descriptor, replace(self.owner, released=True).as_bytes(), 0)
        self._let_go()

    def _let_go(self) -> None:
        _held.discard(self)
        self._done.set()
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take(self, tell: Callable[[str], None]) -> None:
        kernel_lock = self._take_kernel_lock()
        before = read_owner(self.folder)
        # On a local disk the kernel has already shown that nobody holds the folder.
        proven = kernel_lock and lock.is_on_local_disk(self.folder)
        if before is not None and not before.released and not proven:
            self._refuse_living(before, tell)
        os.pwrite(self._descriptor, self.owner.as_bytes(), 0)
        os.fsync(self._descriptor)
        if not kernel_lock:
            # Two takers without a kernel lock: the last one to write its name wins.
            time.sleep(self._times.settle_seconds)
            if not self.still_owner():
                raise self._refusal(read_owner(self.folder))

    def _take_kernel_lock(self) -> bool:
        """Takes the kernel lock; False if the file system has none."""
        # A listing of runs may probe the lock for some microseconds: retry before refusing.
        deadline = time.monotonic() + _RETRY_SECONDS
        try:
            while not lock.try_lock(self._descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise self._refusal(read_owner(self.folder))
                time.sleep(0.02)
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise
            return False
        return True

    def _refuse_living(self, before: Owner, tell: Callable[[str], None]) -> None:
        """Refuses unless the previous owner has certainly ended.

        Raises:
            RunFolderError: it is alive.
        """
        if before.is_near:
            if not before.has_ended:
                raise self._refusal(before)
            return
        tell(f"waiting {self._times.silent_seconds:g} s to see whether {before} is still alive")
        seen = _read_beat(self.folder)
        until = time.monotonic() + self._times.silent_seconds
        while time.monotonic() < until:
            time.sleep(min(self._times.beat_seconds, self._times.silent_seconds) / 4)
            if _read_beat(self.folder) != seen or read_owner(self.folder) != before:
                raise self._refusal(read_owner(self.folder))

    def _refusal(self, owner: Owner | None) -> RunFolderError:
        return RunFolderError(
            f"The run folder is in use by {owner or 'a process that left no name'}.",
            where=str(self.folder),
            rule="one process writes to a run folder at a time",
            remedy="wait for that run to end, stop it, or start a new run",
        )

    def _beat(self, count: int) -> None:
        # Reopened each time: on a network file system only that makes it visible to others.
        path = self.folder / HEARTBEAT_NAME
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, f"{self.attempt} {count:020d}\n".encode(), 0)
        finally:
            os.close(descriptor)


def owns(folder: Path, attempt: str) -> bool:
    """Whether that attempt holds the folder, according to its file."""
    owner = read_owner(folder)
    return owner is not None and owner.attempt == attempt and not owner.released


def _keep_beating(held: weakref.ref[Lease], done: threading.Event, times: LeaseTimes) -> None:
    count = 0
    while not done.wait(times.beat_seconds):
        lease = held()
        # A process that has lost the folder must not send heartbeats.
        if lease is None or not lease.still_owner():
            return
        count += 1
        try:
            lease._beat(count)
        except OSError:
            # A failing disk is reported by whoever writes data to it.
            continue


def _read_beat(folder: Path) -> str:
    try:
        return (folder / HEARTBEAT_NAME).read_text("ascii")
    except (OSError, ValueError):
        return ""


_held: weakref.WeakSet[Lease] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A forked data worker inherits the descriptor, and with it the lock: it would keep the folder
    # of a killed run in use. Closing the child's copy leaves the parent's lock in place. The
    # thread is not touched: it may have held its own locks at the fork.
    for lease in list(_held):
        lease._close()


os.register_at_fork(after_in_child=_let_go_in_child)
