"""One signal asks, a second one ends, in foreign code too; handlers come back."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from surefoot.core.errors import StopRequested
from surefoot.core.interruption import CutShort
from surefoot.engine import interrupt
from surefoot.engine.interrupt import (
    ASKING_SIGNALS,
    Agreement,
    StopOnSignal,
    stopped_before_begin,
)


def pause(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("number", ASKING_SIGNALS)
def test_the_first_signal_asks_and_the_second_ends(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "ECHO_SECONDS", 0.05)
    before = signal.getsignal(number)
    with StopOnSignal() as stop:
        assert stop.after_update() is None and not stop.cut_wait()
        os.kill(os.getpid(), number)
        assert stop.reason == f"stopped by {number.name}" == stop.at_boundary()
        assert stop.cut_wait() and stop.cut_evaluation()
        pause(0.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_one_request_that_comes_by_two_ways_is_one_request() -> None:
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason is not None


STUCK = """
import hashlib, os
from surefoot.engine import interrupt
interrupt.ECHO_SECONDS, interrupt.LEAVE_SECONDS = 0.1, 0.2
with interrupt.StopOnSignal():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def test_a_second_signal_ends_a_process_that_is_stuck_in_foreign_code() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    try:
        process.send_signal(signal.SIGTERM)
        pause(0.5)
        assert process.poll() is None, "one signal only asks"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def test_other_threads_know_while_the_main_thread_is_in_foreign_code() -> None:
    seen: list[tuple[bool, str | None]] = []
    begun = threading.Event()

    def look(stop: StopOnSignal) -> None:
        begun.wait()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.is_asked():
            time.sleep(0.001)
        seen.append((stop.is_asked(), stop.reason))

    with StopOnSignal() as stop:
        assert not stop.is_asked()
        thread = threading.Thread(target=look, args=(stop,))
        thread.start()
        begun.set()
        # Lets other threads run, and no handler; takes several times the 0.2 s before the signal.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 6_000_000)
        thread.join()
        assert seen == [(True, None)] and stop.reason == "stopped by SIGTERM"


def test_what_may_be_left_is_left_at_once() -> None:
    with StopOnSignal() as stop:
        with pytest.raises(CutShort), stop.cutting():
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("went on")
        with pytest.raises(CutShort), stop.cutting():
            pytest.fail("went on, though it had been asked before")


def test_nothing_is_left_where_other_ranks_would_wait_and_all_ranks_decide() -> None:
    asked: list[bool] = []

    def another_rank_says_yes(flag: bool) -> bool:
        asked.append(flag)
        return True

    stop = StopOnSignal(
        Agreement(another_rank_says_yes, lambda flag: flag, lambda flag: False, alone=False)
    )
    assert stop.after_update() == "another rank was asked to stop" and asked == [False]
    assert stop.at_boundary() is None
    with stop, stop.cutting():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason is not None and stop.cut_wait()
        assert not stop.cut_evaluation(), "all ranks leave it, or none"
    elsewhere: list[bool] = []
    stop = StopOnSignal(Agreement(elsewhere=lambda: bool(elsewhere), alone=False))
    assert not stop.cut_wait()
    elsewhere.append(True)
    assert stop.cut_wait()


def test_a_rank_hears_its_scheduler_and_its_launcher_as_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupt, "ECHO_SECONDS", 0.05)
    monkeypatch.setattr(interrupt, "LAUNCHED_ECHO_SECONDS", 0.4)
    with StopOnSignal(Agreement(alone=False)) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        pause(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason is not None
        pause(0.3)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_before_a_run_has_begun_there_is_nothing_to_wait_for(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(StopRequested, match=number.name), stopped_before_begin():
        os.kill(os.getpid(), number)
        pytest.fail("went on")
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("swallowed", [True, False])
def test_whoever_was_interrupted_may_hide_it(swallowed: bool) -> None:
    """A finalizer swallows what comes up in it; native code that calls back has its own error."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StopRequested, match="SIGTERM"), stopped_before_begin():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            if not swallowed:
                raise ValueError("Error calling a function") from error
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_of_its_own_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="its own"), stopped_before_begin():
        raise ValueError("its own")


def test_outside_the_main_thread_no_handler_is_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter() -> None:
        with StopOnSignal() as stop:
            stop.ask("enough")
            seen.append((stop.reason, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [("enough", before)]
