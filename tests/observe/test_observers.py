"""The fan-out: the record's errors are the run's, any other observer is left out and named once."""

from __future__ import annotations

import pytest

from observe.samples import EVALUATION, REPORT
from surefoot.core.errors import RequestError
from surefoot.core.reports import EvalReport, Event, Observer, StepReport
from surefoot.observe.observers import Observers, as_observer

EVENT = Event("save", 3, "saved", {}, 1.0)


class Recorder:
    """Keeps what it is told; raises where asked."""

    def __init__(self, fails_at: str = "", error: type[BaseException] = ValueError) -> None:
        self.told: list[object] = []
        self.closed = 0
        self._fails_at = fails_at
        self._error = error

    def _take(self, method: str, item: object) -> None:
        self.told.append(item)
        if method == self._fails_at:
            raise self._error("broken")

    def on_step(self, report: StepReport) -> None:
        self._take("step", report)

    def on_eval(self, report: EvalReport) -> None:
        self._take("eval", report)

    def on_event(self, event: Event) -> None:
        self._take("event", event)

    def close(self) -> None:
        self.closed += 1
        if self._fails_at == "close":
            raise self._error("broken")


def tell(observers: Observers) -> None:
    observers.on_step(REPORT)
    observers.on_eval(EVALUATION)
    observers.on_event(EVENT)


def test_everybody_is_told_everything() -> None:
    record, view = Recorder(), Recorder()
    observers = Observers([record], [view])
    tell(observers)
    observers.close()
    assert record.told == view.told == [REPORT, EVALUATION, EVENT]
    assert (record.closed, view.closed) == (1, 1)


@pytest.mark.parametrize("method", ["step", "eval", "event"])
def test_a_failing_observer_is_left_out_and_named_once(method: str) -> None:
    record, bad, good = Recorder(), Recorder(fails_at=method), Recorder()
    observers = Observers([record], [bad, good])
    for _ in range(3):
        tell(observers)
    failures = [e for e in record.told if isinstance(e, Event) and e.kind == "observer-failed"]
    assert len(failures) == 1
    assert "Recorder failed" in failures[0].message
    assert "ValueError: broken" in failures[0].message
    assert "broken" in str(failures[0].data["traceback"])
    assert failures[0].step == REPORT.step
    assert len(good.told) == 10  # Three times three, and the news.
    assert len(bad.told) <= 3
    assert bad.closed == 1


def test_two_observers_that_fail_at_the_news_of_each_other_end_it() -> None:
    record = Recorder()
    observers = Observers([record], [Recorder(fails_at="event"), Recorder(fails_at="event")])
    tell(observers)
    tell(observers)
    failures = [e for e in record.told if isinstance(e, Event) and e.kind == "observer-failed"]
    assert len(failures) == 2


def test_an_error_of_the_record_is_the_runs_error() -> None:
    observers = Observers([Recorder(fails_at="step")], [Recorder()])
    with pytest.raises(ValueError, match="broken"):
        observers.on_step(REPORT)


def test_a_keyboard_interrupt_is_not_an_observers_failure() -> None:
    observers = Observers([Recorder()], [Recorder(fails_at="step", error=KeyboardInterrupt)])
    with pytest.raises(KeyboardInterrupt):
        observers.on_step(REPORT)


def test_closing_closes_all_optional_ones_first_and_tells_the_record() -> None:
    record, second, bad = Recorder(), Recorder(), Recorder(fails_at="close")
    observers = Observers([record, second], [bad, Recorder()])
    observers.close()
    assert [e.kind for e in record.told if isinstance(e, Event)] == ["observer-failed"]
    assert (record.closed, second.closed, bad.closed) == (1, 1, 1)


def test_closing_raises_the_records_error_after_all_are_closed() -> None:
    record, bad = Recorder(), Recorder(fails_at="close")
    observers = Observers([record, bad])
    with pytest.raises(ValueError, match="broken"):
        observers.close()
    assert record.closed == 1


class Losses:
    """Has one of the methods."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.losses.append(report.loss)


class Inherited(Observer):
    """Has one, and inherits the others."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def on_event(self, event: Event) -> None:
        self.kinds.append(event.kind)


def test_every_method_is_optional() -> None:
    record, losses, inherited = Recorder(), Losses(), Inherited()
    observers = Observers([record], [losses, inherited])
    tell(observers)
    observers.close()
    assert losses.losses == [REPORT.loss]
    assert inherited.kinds == ["save"]
    assert record.told == [REPORT, EVALUATION, EVENT]


def test_an_observer_with_one_method_that_fails_is_named() -> None:
    class Broken:
        def on_eval(self, report: EvalReport) -> None:
            raise ValueError("broken")

    record = Recorder()
    observers = Observers([record], [Broken()])
    tell(observers)
    failures = [e for e in record.told if isinstance(e, Event) and e.kind == "observer-failed"]
    assert [failure.data["observer"] for failure in failures] == ["Broken"]


def _with_method(name: str) -> object:
    return type("Mine", (), {name: lambda self, report: None, "on_step": lambda self, r: None})()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_stepp", "did you mean on_step"),
        ("on_evaluate", "did you mean on_eval"),
        ("onstep", "did you mean on_step"),
        ("on_batch_end", "rename it"),
    ],
)
def test_a_misspelt_method_is_refused(name: str, meant: str) -> None:
    with pytest.raises(RequestError, match=rf"'{name}', which is never called[\s\S]*{meant}"):
        as_observer(_with_method(name))


@pytest.mark.parametrize("name", ["losses", "summary", "write", "step", "events"])
def test_a_method_of_its_own_is_not_refused(name: str) -> None:
    as_observer(_with_method(name)).on_step(REPORT)


def test_what_observes_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="has no such method"):
        as_observer(object())
    with pytest.raises(RequestError, match=r"call it: Losses\(...\)"):
        as_observer(Losses)
