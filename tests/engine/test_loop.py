"""When the loop steps, evaluates, saves and stops; seen through fakes of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from surefoot.core.reports import Event
from surefoot.data.order import Cursor
from surefoot.engine.cadence import AtEnd, Cadence, Every, Horizon, Unit
from surefoot.engine.guard import Guard
from surefoot.engine.in_flight import Kept, PendingReport
from surefoot.engine.interrupt import StopOnSignal
from surefoot.engine.loop import Loop, LoopParts, Outcome, Status
from surefoot.engine.reporting import ReportLog
from surefoot.engine.window import Window
from surefoot.state.run_state import Progress
from surefoot.state.saver import SaveKind

STEPS_PER_EPOCH = 5
NEVER = AtEnd()


class Recorder:
    """Stands for everything around the loop and writes down what happens."""

    def __init__(
        self,
        *,
        num_windows: int | None = None,
        skipped: frozenset[int] = frozenset(),
        finish_at: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.events: list[tuple[str, int]] = []
        self.progress = progress or Progress()
        self.guard = Guard()
        self.guard.judge = lambda report: None  # type: ignore[method-assign]
        self.log = ReportLog(self.progress, self.guard, [self])
        self.num_windows, self.skipped, self.finish_at = num_windows, skipped, finish_at
        self.stop = StopOnSignal()
        self.stop_after: int | None = None
        self.closed = False
        self.kinds: list[tuple[str, int]] = []

    def update(self, window: Window) -> None:
        self.log.settle()
        number = window.sample_ids[0]
        norm = float("nan") if number in self.skipped else 1.0
        scalars = {"loss": 1.0, "grad_norm": norm, "loss_scale": 1.0}
        self.log.hand_over(PendingReport(window, {"loss": 2.0}, {}, Kept(scalars)))
        if self.stop_after == number:
            self.stop.ask("asked")

    def open_windows(self, cursor: Any) -> Iterator[Window]:
        number = cursor.epoch * STEPS_PER_EPOCH + cursor.position
        try:
            while self.num_windows is None or number < self.num_windows:
                epoch, position = divmod(number + 1, STEPS_PER_EPOCH)
                yield Window((), {"loss": 2.0}, 2, (number,), Cursor(epoch, position))
                number += 1
        finally:
            self.closed = True

    def evaluate(self) -> str | None:
        self.events.append(("evaluate", self.progress.step))
        return "enough" if self.progress.step == self.finish_at else None

    def save(self, kind: SaveKind) -> bool:
        self.events.append(("save", self.progress.step))
        self.kinds.append((kind.value, self.progress.step))
        return True

    def on_step(self, report: Any) -> None:
        self.events.append(("step", report.step))

    def on_event(self, event: Event) -> None:
        self.events.append((event.kind, event.step))

    def compare(self, step: int) -> None:
        self.events.append(("compare", step))

    def run(
        self,
        horizon: Horizon,
        evaluate: Cadence = NEVER,
        save: Cadence = NEVER,
        compare: Cadence = NEVER,
        **others: Any,
    ) -> Outcome:
        return Loop(
            LoopParts(
                self.update,
                self.log,
                self.progress,
                self.open_windows,  # type: ignore[arg-type]
                horizon,
                self.evaluate,
                evaluate,
                self.save,
                save,
                self.stop,
                compare_ranks=self.compare,
                compare_ranks_every=compare,
                **others,
            )
        ).run()


def steps(count: float) -> Horizon:
    return Horizon(count, Unit.STEPS)


def every(count: float, unit: Unit = Unit.STEPS) -> Every:
    return Every(count, unit)


def test_the_whole_order_of_a_short_run() -> None:
    seen = Recorder()
    outcome = seen.run(steps(5), every(2), every(3))
    assert seen.events == [
        ("step", 1),
        ("step", 2),
        ("evaluate", 2),
        ("step", 3),
        ("save", 3),
        ("step", 4),
        ("evaluate", 4),
        ("step", 5),
        ("evaluate", 5),
        ("save", 5),
        ("finished", 5),
    ]
    assert outcome == Outcome(Status.FINISHED, "the horizon is reached", 5)
    assert seen.closed


def test_evaluation_comes_before_the_save_of_the_same_step() -> None:
    seen = Recorder()
    seen.run(steps(4), every(4), every(4))
    assert seen.events[-3:] == [("evaluate", 4), ("save", 4), ("finished", 4)]


def test_ranks_are_compared_before_anything_of_them_is_evaluated_or_saved() -> None:
    seen = Recorder()
    seen.run(steps(4), every(4), every(4), every(2))
    assert [e for e in seen.events if e[0] != "step"] == [
        ("compare", 2),
        ("compare", 4),
        ("evaluate", 4),
        ("save", 4),
        ("finished", 4),
    ]


def test_a_skipped_update_moves_nothing_that_counts_updates() -> None:
    seen = Recorder(skipped=frozenset({1, 2}))
    seen.run(steps(4), every(2))
    assert [e for e in seen.events if e[0] == "evaluate"] == [("evaluate", 2), ("evaluate", 4)]
    assert seen.progress.window == 6 and seen.progress.step == 4


@pytest.mark.parametrize(
    ("horizon", "last"),
    [(Horizon(9, Unit.SAMPLES), 5), (Horizon(2, Unit.EPOCHS), 10)],
)
def test_a_horizon_in_any_unit(horizon: Horizon, last: int) -> None:
    seen = Recorder()
    assert seen.run(horizon).step == last


def test_a_horizon_in_seconds_counts_all_attempts() -> None:
    seen = Recorder()
    outcome = seen.run(Horizon(0.05, Unit.SECONDS))
    assert outcome.step >= 1 and seen.progress.spent_seconds >= 0.05
    resumed = Recorder(progress=seen.progress)
    assert resumed.run(Horizon(0.05, Unit.SECONDS)).step == outcome.step


def test_the_host_runs_one_update_ahead_where_nothing_is_due() -> None:
    seen = Recorder()
    in_flight = []
    update = seen.update

    def observed(window: Window) -> None:
        in_flight.append(seen.log._in_flight is not None)
        update(window)

    seen.update = observed  # type: ignore[method-assign]
    seen.run(steps(6), every(3))
    assert in_flight == [False, True, True, False, True, True]


def test_a_request_finishes_the_update_and_saves_without_an_evaluation() -> None:
    seen = Recorder()
    seen.stop_after = 2
    outcome = seen.run(steps(10), every(5), every(2))
    assert outcome == Outcome(Status.STOPPED, "asked", 3)
    assert seen.events[-3:] == [("step", 3), ("save", 3), ("stopped", 3)]
    assert ("evaluate", 3) not in seen.events and seen.closed


def test_a_request_on_a_step_just_saved_does_not_save_again() -> None:
    seen = Recorder()
    seen.stop_after = 1
    seen.run(steps(10), AtEnd(), every(2))
    assert [e for e in seen.events if e[0] == "save"] == [("save", 2)]


@pytest.mark.parametrize("evaluate", [NEVER, every(2)], ids=["at the end", "before"])
def test_the_last_checkpoint_of_a_run_stays(evaluate: Cadence) -> None:
    seen = Recorder()
    seen.run(steps(4), evaluate, every(3), ephemeral_every=every(1))
    assert seen.kinds == [("ephemeral", 1), ("ephemeral", 2), ("regular", 3), ("final", 4)]
    decided = Recorder(finish_at=2)
    decided.run(steps(9), every(2), ephemeral_every=every(2))
    assert decided.kinds == [("final", 2)]
    ended = Recorder(num_windows=2)
    ended.run(steps(9), evaluate, ephemeral_every=every(2))
    assert ended.kinds == [("ephemeral", 2), ("final", 2)]
    stopped = Recorder()
    stopped.stop_after = 1
    stopped.run(steps(9), NEVER, ephemeral_every=every(2))
    assert stopped.kinds == [("ephemeral", 2), ("final", 2)]


@pytest.mark.parametrize("from_ephemeral", [True, False])
def test_a_run_that_has_ended_is_left_with_a_checkpoint_that_stays(from_ephemeral: bool) -> None:
    progress = Progress(step=5, window=5, samples=10, cursor=Cursor(1, 0), evaluated_step=5)
    seen = Recorder(progress=progress)
    seen.run(steps(5), every(2), from_ephemeral=from_ephemeral)
    assert seen.kinds == [("final", 5)] * from_ephemeral


def test_a_decision_of_an_evaluation_ends_the_run_with_a_save() -> None:
    seen = Recorder(finish_at=4)
    outcome = seen.run(steps(100), every(2))
    assert outcome == Outcome(Status.FINISHED, "enough", 4)
    assert seen.events[-3:] == [("evaluate", 4), ("save", 4), ("finished", 4)]


def test_data_that_ends_ends_the_run() -> None:
    seen = Recorder(num_windows=3)
    outcome = seen.run(steps(100), every(2))
    assert (outcome.reason, outcome.step) == ("the data is at its end", 3)
    assert seen.events[-3:] == [("evaluate", 3), ("save", 3), ("finished", 3)]


def test_a_resume_goes_on_where_it_was() -> None:
    progress = Progress(step=3, window=3, samples=6, cursor=Cursor(0, 3), evaluated_step=2)
    seen = Recorder(progress=progress)
    seen.run(steps(5), every(2), every(10))
    assert seen.events == [
        ("step", 4),
        ("evaluate", 4),
        ("step", 5),
        ("evaluate", 5),
        ("save", 5),
        ("finished", 5),
    ]


def test_a_resume_of_a_finished_run_repeats_nothing() -> None:
    progress = Progress(step=5, window=5, samples=10, cursor=Cursor(1, 0), evaluated_step=5)
    seen = Recorder(progress=progress)
    assert seen.run(steps(5), every(2)).status is Status.FINISHED
    assert seen.events == [("finished", 5)]


def test_workers_are_closed_when_an_update_fails() -> None:
    seen = Recorder()

    def fails(window: Window) -> None:
        raise ValueError("boom")

    seen.update = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="boom"):
        seen.run(steps(5))
    assert seen.closed
