"""Passes each report to several observers, and isolates the run from one that fails.

Essential observers are the record of the run: their errors are the run's errors. Any other
observer that raises is removed, which one event reports. Reports are never changed. An observer
may implement some of the methods only; a misspelt method is refused.
"""

from __future__ import annotations

import difflib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from surefoot.core.errors import RequestError
from surefoot.core.reports import EvalReport, Event, Observer, StepReport
from surefoot.observe.events import EventKind

METHODS: Final = ("on_step", "on_eval", "on_event", "close")
MIN_NAME_SIMILARITY: Final = 0.75
"""Similarity, out of 1, from which a method's name counts as misspelt."""


@dataclass(frozen=True)
class FilledObserver:
    """An observer with some of the methods; the others do nothing."""

    name: str
    on_step: Callable[[StepReport], None]
    on_eval: Callable[[EvalReport], None]
    on_event: Callable[[Event], None]
    close: Callable[[], None]


def as_observer(given: Any) -> Observer:
    """The observer itself, or a wrapper that adds the missing methods as no-ops.

    Raises:
        RequestError: it is a class, has none of the methods, or has a method that resembles one of
            them and would never be called.
    """
    name = type(given).__name__
    rule = f"an observer has at least one of the methods {', '.join(METHODS)}"
    if isinstance(given, type):
        raise RequestError(
            f"the observer is the class {given.__name__}",
            where="observers",
            rule="an observer is an object",
            remedy=f"call it: {given.__name__}(...)",
        )
    for word in dir(given):
        if word in METHODS or word.startswith("_") or not callable(getattr(given, word, None)):
            continue
        near = difflib.get_close_matches(word, METHODS[:3], n=1, cutoff=MIN_NAME_SIMILARITY)
        if near or word.startswith("on_"):
            raise RequestError(
                f"the observer {name} has a method {word!r}, which is never called",
                where="observers",
                rule=rule,
                remedy=f"did you mean {near[0]}?"
                if near
                else f"rename it: it begins with {'on_'!r}",
            )
    has = [method for method in METHODS if callable(getattr(given, method, None))]
    if not set(has) - {"close"}:
        raise RequestError(f"the observer {name} has no such method", where="observers", rule=rule)
    if len(has) == len(METHODS):
        complete: Observer = given
        return complete
    methods = {method: getattr(given, method, _nothing) for method in METHODS}
    return FilledObserver(name, **methods)


def _nothing(*_: object) -> None:
    return None


class Observers:
    """Several observers as one.

    Args:
        essential: metrics log and event log; called first, in this order, and closed last.
        optional: console, sinks, the user's own, each with at least one of the methods.

    Raises:
        RequestError: one of the optional ones is not an observer.
    """

    def __init__(self, essential: Sequence[Observer], optional: Sequence[object] = ()) -> None:
        self._essential = tuple(essential)
        self._optional = tuple(map(as_observer, optional))
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
        """Closes every observer, even if some raise.

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
        """Removes the observer, closes it and reports it to the others."""
        if observer not in self._optional:
            return  # It failed again while its failure was reported.
        self._optional = tuple(other for other in self._optional if other is not observer)
        self._report(observer, error)
        try:
            observer.close()
        except Exception as second:
            self._report(observer, second)

    def _report(self, observer: Observer, error: Exception) -> None:
        name = observer.name if isinstance(observer, FilledObserver) else type(observer).__name__
        self.on_event(
            Event(
                EventKind.OBSERVER_FAILED,
                self._step,
                f"{name} failed and is no longer called: {type(error).__name__}: {error}",
                {"observer": name, "traceback": "".join(traceback.format_exception(error))},
                time.time(),
            )
        )


def _close_all(closers: Sequence[Callable[[], None]]) -> None:
    """Calls all, even if some raise; then raises the first error."""
    if not closers:
        return
    try:
        closers[0]()
    finally:
        _close_all(closers[1:])
