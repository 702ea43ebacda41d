"""Hands each report to many observers, and keeps one that fails from harming the run.

Essential observers are the record of the run: their errors are the run's errors. Any other observer
that raises is left out from then on, said once as an event. It never changes a report.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence

from surefoot.core.reports import EvalReport, Event, Observer, StepReport
from surefoot.observe.events import EventKind


class Observers:
    """Many observers as one.

    Args:
        essential: metrics log and event log; told first, in this order, and closed last.
        optional: console, sinks, the user's own.
    """

    def __init__(self, essential: Sequence[Observer], optional: Sequence[Observer] = ()) -> None:
        self._essential = tuple(essential)
        self._optional = tuple(optional)
        self._step = 0

    def on_step(self, report: StepReport) -> None:
        self._step = report.step
        for observer in self._essential:
            observer.on_step(report)
        for observer in self._optional:
            try:
                observer.on_step(report)
            except Exception as error:
                self._leave_out(observer, error)

    def on_eval(self, report: EvalReport) -> None:
        for observer in self._essential:
            observer.on_eval(report)
        for observer in self._optional:
            try:
                observer.on_eval(report)
            except Exception as error:
                self._leave_out(observer, error)

    def on_event(self, event: Event) -> None:
        for observer in self._essential:
            observer.on_event(event)
        for observer in self._optional:
            try:
                observer.on_event(event)
            except Exception as error:
                self._leave_out(observer, error)

    def close(self) -> None:
        """Closes every observer, whatever the others do.

        Raises:
            Exception: the first error of an essential observer, after all are closed.
        """
        optional, self._optional = self._optional, ()
        for observer in optional:
            try:
                observer.close()
            except Exception as error:
                self._report(observer, error)
        _close_all([observer.close for observer in reversed(self._essential)])

    def _leave_out(self, observer: Observer, error: Exception) -> None:
        """Drops the observer, closes what it holds and says so to the others."""
        if observer not in self._optional:
            return  # It failed again while the news of its failure went round.
        self._optional = tuple(other for other in self._optional if other is not observer)
        self._report(observer, error)
        try:
            observer.close()
        except Exception as second:
            self._report(observer, second)

    def _report(self, observer: Observer, error: Exception) -> None:
        name = type(observer).__name__
        self.on_event(
            Event(
                EventKind.OBSERVER_FAILED,
                self._step,
                f"{name} failed and is left out from here on: {type(error).__name__}: {error}",
                {"observer": name, "traceback": "".join(traceback.format_exception(error))},
                time.time(),
            )
        )


def _close_all(closers: Sequence[Callable[[], None]]) -> None:
    """Calls all, also where some raise; the first error comes out."""
    if not closers:
        return
    try:
        closers[0]()
    finally:
        _close_all(closers[1:])
