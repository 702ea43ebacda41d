"""The console: never keeps the run waiting, and gives the terminal back whatever happens."""

from __future__ import annotations

import inspect
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from observe.samples import EVALUATION, REPORT, report
from surefoot.core.errors import SurefootError
from surefoot.core.reports import Event
from surefoot.observe.observers import Observers
from surefoot.observe.terminal import console as module
from surefoot.observe.terminal.console import ConsoleView, Mode, choose_mode
from surefoot.observe.terminal.view import RunFacts

FACTS = RunFacts("a-run", "runs/a-run", 100)
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Screen:
    """A terminal whose other end this test reads."""

    def __init__(self) -> None:
        self.parent, child = pty.openpty()
        self.stream = os.fdopen(child, "w", encoding="utf-8")
        self._text = ""

    def read(self) -> str:
        """All that was written so far."""
        while select.select([self.parent], [], [], 0.05)[0]:
            try:
                chunk = os.read(self.parent, 1 << 16)
            except OSError:  # The other end is closed.
                break
            if not chunk:
                break
            self._text += chunk.decode("utf-8")
        return self._text

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + 20
        while text not in self.read():
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self._text!r}"
        return self._text


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    yield screen
    screen.stream.close()
    os.close(screen.parent)


def test_a_report_is_stored_and_nothing_else() -> None:
    source = inspect.getsource(ConsoleView.on_step).splitlines()[1:]
    assert [line.strip() for line in source] == ["self.latest = report"]


def test_plain_lines_show_the_first_update_then_one_now_and_then() -> None:
    now = [0.0]
    stream = io.StringIO()
    view = ConsoleView(FACTS, "plain", stream, clock=lambda: now[0])
    view._show_plain(last=False)
    assert stream.getvalue() == ""
    for step in range(1, 13):
        now[0] = float(step)
        view.on_step(report(step))
        view._show_plain(last=False)
        view._show_plain(last=False)
    view._show_plain(last=True)
    view._show_plain(last=True)
    steps = re.findall(r"^step (\d+)/100  loss 2.5000  grad_norm 0.3000", stream.getvalue(), re.M)
    assert steps == ["1", "6", "11", "12"]


def test_a_run_without_a_terminal_shows_evaluations_events_and_its_end() -> None:
    stream = io.StringIO()
    view = ConsoleView(FACTS, "auto", stream).start()
    assert view.mode == "plain"
    view.on_event(Event("start", 0, "a new run", {}, 1.0))
    view.on_step(REPORT)
    view.on_eval(EVALUATION)
    view.close()
    view.close()
    assert "\x1b" not in stream.getvalue()
    lines = stream.getvalue().splitlines()
    assert "start at step 0: a new run" in lines
    assert "eval validation at step 3  loss 2.4000" in lines
    assert any(line.startswith("step 3/100") for line in lines)


def test_off_shows_nothing_and_nothing_is_shown_before_the_start() -> None:
    for view in (ConsoleView(FACTS, "off", io.StringIO()).start(), ConsoleView(FACTS, "plain")):
        view.on_step(REPORT)
        view.on_eval(EVALUATION)
        view.on_event(Event("save", 1, "", {}, 1.0))
        assert view._thread is None
        view.close()
        assert view._news.empty()


@pytest.mark.parametrize(
    ("terminal", "term", "encoding", "mode"),
    [
        (True, "xterm-256color", "utf-8", "live"),
        (True, "dumb", "utf-8", "plain"),
        (True, "xterm", "ascii", "plain"),
        (False, "xterm-256color", "utf-8", "plain"),
    ],
)
def test_live_needs_a_terminal_that_can(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str, encoding: str, mode: Mode
) -> None:
    monkeypatch.setenv("TERM", term)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    assert choose_mode("auto", Terminal(file=stream)) == mode
    assert choose_mode("plain", Terminal(file=stream)) == "plain"


def test_the_live_view_shows_the_run_and_gives_the_terminal_back(screen: Screen) -> None:
    view = ConsoleView(FACTS, "auto", screen.stream).start()
    assert view.mode == "live"
    screen.wait_for(HIDE_CURSOR)
    view.on_step(report(62))
    view.on_eval(EVALUATION)
    screen.wait_for("62 / 100 steps")
    view.on_event(Event("finished", 62, "well done", {}, 1.0))
    view.close()
    text = screen.read()
    assert "well done" in text
    assert "\x1b[1;33m" in text or "\x1b[33m" in text  # It has colours.
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


def test_no_color_takes_the_colours_and_not_the_view(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    view = ConsoleView(FACTS, "auto", screen.stream).start()
    view.on_step(report(62))
    screen.wait_for("62 / 100 steps")
    view.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", screen.read())


def test_a_frame_that_fails_gives_the_terminal_back_and_is_told(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise ZeroDivisionError("a bad frame")

    monkeypatch.setattr(module, "render_frame", refuse)
    view = ConsoleView(FACTS, "live", screen.stream).start()
    with pytest.raises(SurefootError, match="a bad frame"):
        view.close()
    text = screen.read()
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


def test_a_closed_stream_ends_the_view_and_not_the_run() -> None:
    class Record:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def on_step(self, report: object) -> None: ...

        def on_eval(self, report: object) -> None: ...

        def on_event(self, event: Event) -> None:
            self.events.append(event)

        def close(self) -> None: ...

    stream = io.StringIO()
    record = Record()
    view = ConsoleView(FACTS, "plain", stream).start()
    stream.close()
    observers = Observers([record], [view])
    thread = view._thread
    assert thread is not None
    observers.on_step(REPORT)
    observers.on_eval(EVALUATION)
    thread.join(timeout=20)
    for _ in range(3):
        observers.on_eval(EVALUATION)
    observers.close()
    assert [event.kind for event in record.events] == ["observer-failed"]


PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from observe.samples import report
from surefoot.observe.terminal.console import ConsoleView
from surefoot.observe.terminal.view import RunFacts
view = ConsoleView(RunFacts("a-run", "runs/a-run", 100), "live").start()
print("one line of the user's own")
view.on_step(report(3))
time.sleep(0.2)
how = sys.argv[2]
if how == "fork":
    child = os.fork()
    if child == 0:
        streams = sys.stdout is sys.__stdout__ and view._live is None and view._thread is None
        view.close()
        os._exit(0 if streams else 9)
    how = f"child {os.waitpid(child, 0)[1]}"
    view.close()
    print(how)
try:
    if how == "error":
        raise RuntimeError("boom")
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
finally:
    if how != "forget":
        view.close()
"""


@pytest.mark.parametrize("how", ["end", "error", "interrupt", "forget", "fork"])
def test_the_terminal_is_given_back_however_the_program_ends(screen: Screen, how: str) -> None:
    tests = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tests, how],
        stdin=subprocess.DEVNULL,
        stdout=screen.stream,
        stderr=screen.stream,
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        screen.read()
    text = screen.read()
    code = {"error": 1, "interrupt": -signal.SIGINT}.get(how, 0)
    assert process.wait(timeout=1) == code, text
    assert HIDE_CURSOR in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert "one line of the user's own" in text
    assert "3 / 100 steps" in text
    if how == "error":
        assert "RuntimeError: boom" in text[text.rindex(SHOW_CURSOR) :]
    if how == "fork":
        assert "child 0" in text
