"""Turns a signal into a request: the run finishes its update, saves and stops.

The first SIGINT or SIGTERM asks; a second one ends the process at once. Handlers are put back on
the way out.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

ASKING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """A context in which signals are requests. Outside the main thread it only remembers `ask`."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._previous: dict[int, Any] = {}

    def ask(self, reason: str) -> None:
        """Asks the run to stop at its next boundary."""
        self.reason = reason

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in ASKING_SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            raise KeyboardInterrupt
        self.ask(f"stopped by {signal.Signals(number).name}")
