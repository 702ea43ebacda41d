"""Turns a signal into a request: the run comes to a safe point, saves and stops.

The first SIGINT, SIGTERM or SIGUSR1 asks; a second one ends the process at once, also where the
interpreter is stuck in foreign code. Handlers are put back on the way out. What is asked of one
rank counts only when all ranks have agreed on it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from surefoot.core.errors import StopRequested
from surefoot.core.interruption import CutShort, never

ASKING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ECHO_SECONDS = 0.5
"""A terminal and a wrapper may both pass one request on: so soon after, it is the same one."""
LAUNCHED_ECHO_SECONDS = 3.0
"""The same for a rank: a scheduler tells it, and its launcher, which tells it too. A launcher that
is told twice ends its ranks, whatever they took the second request for."""
LEAVE_SECONDS = 5.0
"""A process that is told a second time and has not left after this is ended from beside."""
SIGNALLED_EXIT = 128


def _as_asked(asked: bool) -> bool:
    return asked


@dataclass(frozen=True)
class Agreement:
    """How the ranks of a run agree to stop; the default is that of one rank."""

    each_update: Callable[[bool], bool] = _as_asked
    """Called once after every update, on every rank: whether any rank was asked. Must not wait for
    the device: let the flag travel with numbers that are summed over the ranks anyway."""
    now: Callable[[bool], bool] = _as_asked
    """The same where all ranks stand at one place outside of an update, and may wait."""
    each_batch: Callable[[bool], bool] = _as_asked
    """The same between two batches of an evaluation, on every rank."""
    elsewhere: Callable[[], bool] = never
    """Whether another rank was asked, as far as is known here. May be late, and never waits."""
    alone: bool = True
    """Whether this rank may leave work that the others do not see it leave."""


class StopOnSignal:
    """A context in which signals are requests. Outside the main thread it only remembers `ask`.

    Args:
        agreement: with the other ranks.
    """

    def __init__(self, agreement: Agreement | None = None) -> None:
        self.reason: str | None = None
        """What this rank was asked."""
        self.agreement = agreement or Agreement()
        self._cutting = False
        self._first: float | None = None
        self._previous: dict[int, Any] = {}
        self._watch: _SecondSignal | None = None

    def ask(self, reason: str) -> None:
        """Asks the run to stop at its next boundary."""
        self.reason = reason

    def is_asked(self) -> bool:
        """Whether this rank was asked, as any thread may find out.

        A rank that waits for another in foreign code runs no handler, and so has no `reason` yet.
        """
        return self.reason is not None or (self._watch is not None and self._watch.has_heard)

    def after_update(self) -> str | None:
        """Why all ranks stop after this update, or None."""
        return self._agreed(self.agreement.each_update)

    def at_boundary(self) -> str | None:
        """Why all ranks stop where they stand, or None."""
        return self._agreed(self.agreement.now)

    def cut_wait(self) -> bool:
        """Whether a wait for data shall be left; the other ranks are told where they meet."""
        return self.reason is not None or self.agreement.elsewhere()

    def cut_evaluation(self) -> bool:
        """Whether all ranks leave an evaluation, between two batches."""
        return self.agreement.each_batch(self.reason is not None)

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """What runs in here is left at once, wherever it is, when a stop is asked for.

        Only for work whose half-done traces nobody will read.

        Raises:
            CutShort: a stop is asked for, now or before.
        """
        if not self.agreement.alone:
            yield
            return
        self._cutting = True
        try:
            if self.reason is not None:
                raise CutShort
            yield
        finally:
            self._cutting = False

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in ASKING_SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
            self._watch = _SecondSignal(self._echo_seconds)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _echo_seconds(self) -> float:
        return ECHO_SECONDS if self.agreement.alone else LAUNCHED_ECHO_SECONDS

    def _agreed(self, agree: Callable[[bool], bool]) -> str | None:
        if not agree(self.reason is not None):
            return None
        return self.reason or "another rank was asked to stop"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first > self._echo_seconds():
            raise KeyboardInterrupt
        self.ask(f"stopped by {signal.Signals(number).name}")
        if self._cutting:
            raise CutShort


class _SecondSignal:
    """Counts signals beside the interpreter: a handler in Python waits until foreign code returns.

    Python writes the number of each signal into a socket at once; a thread reads it.
    """

    def __init__(self, echo_seconds: Callable[[], float]) -> None:
        self._echo_seconds = echo_seconds
        self.has_heard = False
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._theirs = theirs
        self._before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._left = threading.Event()
        _watching.add(self)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._left.set()
        _watching.discard(self)
        signal.set_wakeup_fd(self._before)
        self._theirs.close()
        self._thread.join()
        self._ours.close()

    def _read(self) -> None:
        first: float | None = None
        while numbers := self._ours.recv(64):
            if self._before >= 0:
                # Whoever listened before us goes on hearing.
                os.write(self._before, numbers)
            asking = [number for number in numbers if number in ASKING_SIGNALS]
            now = time.monotonic()
            if not asking:
                continue
            self.has_heard = True
            first = first or now
            if now - first > self._echo_seconds() and not self._left.wait(LEAVE_SECONDS):
                os._exit(SIGNALLED_EXIT + asking[-1])


_watching: weakref.WeakSet[_SecondSignal] = weakref.WeakSet()


def _deafen_child() -> None:
    # What a forked child is told is not meant for its parent.
    if _watching:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_deafen_child)


@contextmanager
def stopped_before_begin() -> Iterator[None]:
    """Until a run has begun, SIGTERM and SIGUSR1 end it at once: there is nothing to lose.

    Raises:
        StopRequested: one came.
    """
    told = ""

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = signal.Signals(number).name
        raise CutShort

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGUSR1) if is_main else ()
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        try:
            yield
        except BaseException:
            # Native code that called back into Python has an error of its own for what came up.
            if not told:
                raise
        if told:  # Also where whoever was interrupted swallowed it, such as a finalizer.
            raise StopRequested(
                f"stopped by {told} outside of training",
                rule="what was saved before is whole",
                remedy="start or resume the run again",
            )
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
