"""A periodic line for the log of a batch system without a terminal."""

from __future__ import annotations

import sys

from surefoot.core.errors import RequestError
from surefoot.core.reports import EvalReport, Event, StepReport


class Heartbeat:
    """Prints a line to standard error at most every so many seconds, and each evaluation and event.

    Args:
        every_seconds: shortest time between two lines of updates; 0 prints every update.

    Raises:
        RequestError: the time is negative.

    >>> Heartbeat(every_seconds=30)
    Heartbeat(every_seconds=30)
    """

    def __init__(self, every_seconds: float = 60.0) -> None:
        if not 0 <= every_seconds < float("inf"):
            raise RequestError(
                f"every_seconds is {every_seconds}",
                where="observers: heartbeat",
                rule="a finite time of at least 0",
            )
        self.every_seconds = every_seconds
        self._last: StepReport | None = None

    def __repr__(self) -> str:
        return f"Heartbeat(every_seconds={self.every_seconds})"

    def on_step(self, report: StepReport) -> None:
        last = self._last
        if last is not None and report.time - last.time < self.every_seconds:
            return
        self._last = report
        line = f"step {report.step}, loss {report.loss:.6g}, grad_norm {report.grad_norm:.3g}"
        if last is not None and report.time > last.time:
            rate = (report.window - last.window) / (report.time - last.time)
            line += f", {rate:.3g} updates/s"
        _print(line)

    def on_eval(self, report: EvalReport) -> None:
        found = ", ".join(f"{name} {value:.6g}" for name, value in report.metrics.items())
        _print(f"step {report.step}, {report.name}: {found}")

    def on_event(self, event: Event) -> None:
        _print(f"step {event.step}, {event.kind}: {event.message}")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
