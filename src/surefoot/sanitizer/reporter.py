"""Last words: a process says what it saw also where it ends without coming to its end.

Reports now and then, and right before `os._exit`, `os.abort` or a signal that the process sends to
itself. Never keeps a process from ending the way it wants to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.session import Audit
from surefoot.sanitizer.summary import RUNNING, write_report

SECONDS_BETWEEN_REPORTS = 10.0
KILLED = "killed"
_reporters: weakref.WeakSet[Reporter] = weakref.WeakSet()


class Reporter:
    """While active, `folder` holds what `watch` has seen up to a little while ago."""

    def __init__(self, watch: Audit, folder: Path) -> None:
        self.watch = watch
        self.folder = folder
        self.of_parent: int | None = None
        """Updates that the parent had seen when it forked this process; None in the parent."""
        self._latest = time.monotonic()
        self._patches = Patches(watch.trace)
        _reporters.add(self)

    def __enter__(self) -> Reporter:
        self.watch.trace.after_update.append(self._now_and_then)
        self._patches.set(os, "_exit", self._before_exit(os._exit))
        self._patches.set(os, "abort", self._before_abort(os.abort))
        self._patches.set(os, "kill", self._before_signal(os.kill, own=os.getpid))
        self._patches.set(os, "killpg", self._before_signal(os.killpg, own=os.getpgrp))
        original = signal.raise_signal
        raised = self._before_signal(lambda _, number: original(number), own=os.getpid)
        self._patches.set(signal, "raise_signal", lambda number: raised(os.getpid(), number))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._patches.restore()
        if self._now_and_then in self.watch.trace.after_update:
            self.watch.trace.after_update.remove(self._now_and_then)

    @property
    def has_nothing_new(self) -> bool:
        """Whether this is a forked child that trained nothing of its own."""
        return self.of_parent is not None and self.watch.trace.updates <= self.of_parent

    def write(self, outcome: str) -> None:
        """Leaves a report of this process."""
        if self.has_nothing_new:
            return
        # Where the folder is gone, nobody is left who would read it.
        with contextlib.suppress(OSError):
            write_report(self.watch.summary(outcome), self.folder)

    def _now_and_then(self) -> None:
        updates, now = self.watch.trace.updates, time.monotonic()
        due = now - self._latest > SECONDS_BETWEEN_REPORTS
        # Powers of four: a short run has a report too.
        if due or (updates & (updates - 1) == 0 and updates.bit_length() % 2 == 1):
            self.write(RUNNING)
            self._latest = time.monotonic()

    def _before_exit(self, original: Any) -> Any:
        def leave(status: int) -> None:
            self.watch.trace.safely(self.write, "completed" if status == 0 else "crashed")
            original(status)

        return leave

    def _before_abort(self, original: Any) -> Any:
        def abort() -> None:
            self.watch.trace.safely(self.write, KILLED)
            original()

        return abort

    def _before_signal(self, original: Any, own: Any) -> Any:
        def send(target: int, number: int) -> None:
            # A handler of the script's own does not end it.
            if target in (0, own()) and number and signal.getsignal(number) is signal.SIG_DFL:
                self.watch.trace.safely(self.write, KILLED)
            original(target, number)

        return send


def _forked() -> None:
    for reporter in _reporters:
        reporter.of_parent = reporter.watch.trace.updates


os.register_at_fork(after_in_child=_forked)
