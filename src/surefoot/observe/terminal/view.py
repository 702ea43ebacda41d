"""What the console shows, as numbers: a frozen view, computed from the latest report.

Only reads reports and clocks. `frame.py` renders it; `console.py` writes it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from surefoot.core.reports import EvalReport, Event, StepReport
from surefoot.observe.events import EventKind

CURVE_POINTS = 256
RECENT_POINTS = 14
SPEED_WINDOW_SECONDS = 30.0

Unit = Literal["steps", "tokens", "samples", "epochs", "seconds"]
State = Literal["starting", "training", "finished", "stopped", "failed"]

_STATE_OF_END: Mapping[str, State] = {
    EventKind.FINISHED: "finished",
    EventKind.STOPPED: "stopped",
    EventKind.FAILURE: "failed",
}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What does not change during a run."""

    name: str
    folder: str
    total: float
    """Where the run ends, in `unit`."""
    unit: Unit = "steps"
    counts: Literal["tokens", "samples"] = "samples"
    """The unit of the speed."""
    device: str = ""
    """For display, such as `cpu` or `NVIDIA H100`."""
    precision: str = ""
    seconds_before: float = 0.0
    """Spent by earlier attempts of the run; counts where `unit` is seconds."""


@dataclass(frozen=True, slots=True)
class View:
    """State of a run at one moment. None: not known yet."""

    facts: RunFacts
    state: State
    done: float
    """In the unit of `facts.total`."""
    elapsed_seconds: float
    """Since this process began the run."""
    remaining_seconds: float | None
    report: StepReport | None
    speed: float | None
    """Tokens or samples per second, evaluations and saves included."""
    data_wait: float | None
    """Share of the recent updates' time that was spent waiting for data."""
    skipped: int
    quiet_seconds: float
    """Seconds since the last report."""
    recent: tuple[float, ...]
    """The most recent losses, thinned out."""
    curve: tuple[tuple[int, float], ...]
    """(step, loss) over the whole run, thinned out."""
    evaluations: tuple[EvalReport, ...]
    """The latest evaluation of each validation set."""
    evaluation_curve: tuple[tuple[int, float], ...]
    """(step, loss) of the first validation set."""
    note: str
    """The latest message."""


class ThinnedCurve:
    """Points over a whole run in bounded memory: when full, neighbours are averaged in pairs."""

    def __init__(self, capacity: int = CURVE_POINTS) -> None:
        self._capacity = capacity
        self._points: list[tuple[int, float]] = []
        self._first: tuple[tuple[int, float], ...] = ()
        self._stride = 1
        self._waiting: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        """Adds a point; non-finite values are left out."""
        if not math.isfinite(value):
            return
        if not self._first:
            self._first = ((step, value),)
            return
        self._waiting.append((step, value))
        if len(self._waiting) < self._stride:
            return
        self._points.append(_mean(self._waiting))
        self._waiting.clear()
        if len(self._points) >= self._capacity:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(list(pair)) for pair in pairs]
            self._stride *= 2

    def points(self) -> tuple[tuple[int, float], ...]:
        """All points; the first value and the last pending one are exact."""
        return (*self._first, *self._points, *self._waiting[-1:])


def _mean(points: list[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], sum(value for _, value in points) / len(points)


@dataclass(slots=True)
class _Moment:
    time: float
    done: float
    items: int
    data_seconds: float
    step_seconds: float


class Tracker:
    """Turns reports into views. Belongs to one thread.

    Args:
        began: clock reading at the start of this process's part of the run.
    """

    def __init__(self, facts: RunFacts, began: float) -> None:
        self.facts = facts
        self.began = began
        self._moments: deque[_Moment] = deque()
        self._recent: deque[float] = deque(maxlen=RECENT_POINTS)
        self._curve = ThinnedCurve()
        self._evaluation_curve = ThinnedCurve()
        self._evaluations: dict[tuple[str, str], EvalReport] = {}
        self._report: StepReport | None = None
        self._seen_at = began
        self._state: State = "starting"
        self._note = ""

    def note_eval(self, report: EvalReport) -> None:
        """Records an evaluation."""
        first = next(iter(self._evaluations), (report.name, report.weights))
        self._evaluations[report.name, report.weights] = report
        if (report.name, report.weights) == first:
            self._evaluation_curve.add(report.step, report.metrics.get("loss", math.nan))

    def note_event(self, event: Event) -> None:
        """Records an event."""
        self._state = _STATE_OF_END.get(event.kind, self._state)
        self._note = event.message

    def view(self, report: StepReport | None, now: float) -> View:
        """The state at clock reading `now`; `report` is the latest one."""
        if report is not None and report is not self._report:
            self._take(report, now)
        report = self._report
        done = self._done(report, now)
        return View(
            facts=self.facts,
            state=self._state,
            done=done,
            elapsed_seconds=now - self.began,
            remaining_seconds=self._remaining_seconds(done, now),
            report=report,
            speed=self._speed(),
            data_wait=self._data_wait(),
            skipped=report.window - report.step if report else 0,
            quiet_seconds=now - self._seen_at if report else now - self.began,
            recent=tuple(self._recent),
            curve=self._curve.points(),
            evaluations=tuple(self._evaluations.values()),
            evaluation_curve=self._evaluation_curve.points(),
            note=self._note,
        )

    def _take(self, report: StepReport, now: float) -> None:
        self._report = report
        self._seen_at = now
        if self._state == "starting":
            self._state = "training"
        if math.isfinite(report.loss):
            self._recent.append(report.loss)
        self._curve.add(report.step, report.loss)
        items = report.tokens if self.facts.counts == "tokens" else report.samples
        self._moments.append(
            _Moment(
                report.time or now,
                self._done(report, now),
                items,
                report.data_seconds,
                report.step_seconds,
            )
        )
        # At least two moments are kept, so that slow updates have a speed.
        while len(self._moments) > 2 and (
            self._moments[-1].time - self._moments[0].time > SPEED_WINDOW_SECONDS
        ):
            self._moments.popleft()

    def _done(self, report: StepReport | None, now: float) -> float:
        if self.facts.unit == "seconds":
            return self.facts.seconds_before + now - self.began
        if report is None:
            return 0.0
        return {
            "steps": report.step,
            "tokens": report.tokens,
            "samples": report.samples,
            "epochs": report.epoch + report.ends_epoch,
        }[self.facts.unit]

    def _remaining_seconds(self, done: float, now: float) -> float | None:
        left = max(0.0, self.facts.total - done)
        if self.facts.unit == "seconds" or left == 0:
            return left
        rate = self._rate(lambda moment: moment.done)
        if not rate:
            return None
        return max(0.0, left / rate - (now - self._seen_at))

    def _speed(self) -> float | None:
        return self._rate(lambda moment: moment.items)

    def _rate(self, count: Callable[[_Moment], float]) -> float | None:
        """Growth of a count per second over the kept moments; None if unknown."""
        if not self._moments:
            return None
        first, last = self._moments[0], self._moments[-1]
        if last.time > first.time:
            return (count(last) - count(first)) / (last.time - first.time)
        # With one moment only: the average window, at the pace of the last one.
        report = self._report
        if report is None or report.step_seconds <= 0 or report.window <= 0:
            return None
        return count(last) / report.window / report.step_seconds

    def _data_wait(self) -> float | None:
        spent = sum(moment.step_seconds for moment in self._moments)
        waited = sum(moment.data_seconds for moment in self._moments)
        return min(1.0, waited / spent) if spent > 0 else None
