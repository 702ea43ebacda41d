"""One signal asks, a second one ends; handlers come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from surefoot.engine.interrupt import StopOnSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopOnSignal() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == f"stopped by {number.name}"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


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
