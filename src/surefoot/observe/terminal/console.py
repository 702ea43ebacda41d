"""The console: a live view on a terminal, plain lines anywhere else.

A separate thread reads the latest report about twice a second; the run stores one attribute per
update and never waits. `close` always restores the terminal.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Literal, TextIO

from rich.console import Console as Terminal
from rich.live import Live

from surefoot.core.errors import SurefootError
from surefoot.core.reports import EvalReport, Event, StepReport
from surefoot.observe.terminal.frame import (
    plain_eval_line,
    plain_event_line,
    plain_step_line,
    render_frame,
)
from surefoot.observe.terminal.view import RunFacts, Tracker

Mode = Literal["auto", "live", "plain", "off"]

REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 5.0
_JOIN_SECONDS = 5.0


class ConsoleView:
    """Shows a run to a person. An Observer; shows nothing before `start`.

    Args:
        facts: what does not change during the run.
        mode: `auto` is live on a terminal that can show it, plain lines elsewhere; `off` shows
            stream: destination; default: standard error, so that standard output is left to the
                command's answer.
            answer.
        clock: for tests.
    """

    def __init__(
        self,
        facts: RunFacts,
        mode: Mode = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self._stream = sys.stderr if stream is None else stream
        self._terminal = Terminal(file=self._stream)
        self.mode = choose_mode(mode, self._terminal)
        self.latest: StepReport | None = None
        self._clock = clock
        self._news: queue.SimpleQueue[EvalReport | Event] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closing = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._tracker = Tracker(facts, clock())
        self._last_line_at = -PLAIN_SECONDS
        self._last_window = 0

    # -- what the run calls ---------------------------------------------------------------------

    def on_step(self, report: StepReport) -> None:
        self.latest = report

    def on_eval(self, report: EvalReport) -> None:
        self._tell(report)

    def on_event(self, event: Event) -> None:
        self._tell(event)

    def start(self) -> ConsoleView:
        """Takes the terminal and starts to show the run; returns itself."""
        if self.mode == "off" or self._thread is not None:
            return self
        self._tracker.began = self._clock()
        atexit.register(self.close)
        _active.add(self)
        if self.mode == "live":
            # Only streams that go to a terminal may be redirected past the live view.
            self._live = Live(
                console=self._terminal,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._streams = sys.stdout, sys.stderr
            self._live.start()
        self._thread = threading.Thread(target=self._run, name="surefoot-console", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Shows the last numbers and restores the terminal; idempotent.

        Raises:
            SurefootError: the output has failed.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.close)
        _active.discard(self)
        self._closing = True
        self._wake.set()
        try:
            thread.join(_JOIN_SECONDS)
        finally:
            if self._live is not None:
                live, self._live = self._live, None
                live.stop()
        self._check()

    # -- the thread -----------------------------------------------------------------------------

    def _tell(self, item: EvalReport | Event) -> None:
        if self._failure is not None:
            self._check()
        if self._thread is not None:
            self._news.put(item)
            self._wake.set()

    def _check(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise SurefootError(f"The console cannot be written to: {failure}") from failure

    def _run(self) -> None:
        try:
            while not self._closing:
                self._show(last=False)
                self._wake.wait(REFRESH_SECONDS)
                self._wake.clear()
            self._show(last=True)
        except Exception as error:
            # The run continues without a view; the error is raised at the next evaluation or event.
            self._failure = error

    def _show(self, last: bool) -> None:
        if self._live is not None:
            self._show_live(self._live)
        else:
            self._show_plain(last)

    def _show_live(self, live: Live) -> None:
        while not self._news.empty():
            item = self._news.get()
            if isinstance(item, EvalReport):
                self._tracker.note_eval(item)
            else:
                self._tracker.note_event(item)
        view = self._tracker.view(self.latest, self._clock())
        live.update(render_frame(view, self._terminal.width), refresh=True)

    def _show_plain(self, last: bool) -> None:
        now = self._clock()
        view = self._tracker.view(self.latest, now)
        window = view.report.window if view.report else 0
        lines = []
        due = last or now - self._last_line_at >= PLAIN_SECONDS
        if due and window > self._last_window:
            lines.append(plain_step_line(view))
            self._last_line_at, self._last_window = now, window
        while not self._news.empty():
            item = self._news.get()
            if isinstance(item, EvalReport):
                lines.append(plain_eval_line(item))
            else:
                lines.append(plain_event_line(item))
        if lines:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()


def choose_mode(mode: Mode, terminal: Terminal) -> Mode:
    """The mode that `auto` means on this terminal; other modes are returned unchanged.

    `live` needs a terminal with cursor movement (not `TERM=dumb`) and Unicode. `NO_COLOR` removes
    the colours, not the view.
    """
    if mode != "auto":
        return mode
    able = terminal.is_terminal and not terminal.is_dumb_terminal
    return "live" if able and not terminal.options.ascii_only else "plain"


_active: weakref.WeakSet[ConsoleView] = weakref.WeakSet()


def _leave_in_child() -> None:
    # A forked data worker has no such thread, and its copy of the live view's lock may be held for
    # ever: it must print past the view and must not touch the terminal's state.
    for view in list(_active):
        if view._live is not None:
            sys.stdout, sys.stderr = view._streams
        view._thread = view._live = None
    _active.clear()


os.register_at_fork(after_in_child=_leave_in_child)
