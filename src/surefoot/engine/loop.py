"""The loop: when to step, evaluate, save and stop. What a step is, it does not know.

At every boundary the order is: settle the update in flight, evaluate, decide, save, stop; so a
checkpoint always holds what the evaluation at its step has decided. The host runs one update ahead
of the device except where something is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, Protocol

from surefoot.core.interruption import CutShort
from surefoot.core.reports import Event
from surefoot.engine.cadence import AtEnd, Cadence, Horizon, Mark, frontier
from surefoot.engine.reporting import ReportLog
from surefoot.engine.spike_guard import RollBack, RolledBack
from surefoot.engine.step import Update
from surefoot.engine.window import Window
from surefoot.observe.time_ledger import Phase
from surefoot.state.run_state import Progress
from surefoot.state.saver import SaveKind


class Status(Enum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run."""

    status: Status
    reason: str
    step: int


class WindowStream(Protocol):
    """Opens the data at a cursor."""

    def __call__(self, cursor: Any) -> Iterator[Window]: ...


class StopRequest(Protocol):
    """Says whether the ranks are asked to stop, the same to all of them."""

    def after_update(self) -> str | None: ...

    def at_boundary(self) -> str | None: ...

    def cutting(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class LoopParts:
    """What the loop drives."""

    update: Update
    log: ReportLog
    progress: Progress
    open_windows: WindowStream
    horizon: Horizon
    evaluate: Callable[[], str | None]
    """Evaluates every validation set; returns a reason to finish, or None."""
    evaluate_every: Cadence
    save: Callable[[SaveKind], bool]
    """Saves, or begins to; False where it could not and the run goes on."""
    save_every: Cadence
    stop_request: StopRequest
    finish_saves: Callable[[], object] = lambda: None
    """Waits for what is still being written."""
    is_best: Callable[[int], bool] = lambda step: False
    """Whether the evaluation at this step is the best so far, and is to be saved."""
    ephemeral_every: Cadence = field(default_factory=AtEnd)
    """When a checkpoint is due that only bridges the time to the next one."""
    decided_before: Callable[[], str | None] = lambda: None
    """Why evaluations before a resume have ended the run already, or None."""
    clock: Callable[[], float] = time.monotonic
    """Seconds; the same on all ranks."""
    roll_back: Callable[[RollBack], None] = lambda roll_back: None
    """Puts the state back to a checkpoint before the spike."""
    saves_first: bool = False
    """Whether the state before the first update is saved, to go back to."""
    compare_ranks: Callable[[int], None] = lambda step: None
    """Refuses to go on with ranks that are not equal any more."""
    compare_ranks_every: Cadence = field(default_factory=AtEnd)
    from_ephemeral: bool = False
    """Whether the checkpoint that the run goes on from only bridges the time to the next one."""
    slow_first_update: bool = False
    """Whether the first update compiles: it may be left half done, and loses nothing."""


class Loop:
    """Runs updates until the horizon, a decision or a request ends the run."""

    def __init__(self, parts: LoopParts) -> None:
        self.parts = parts
        self._saved_step = parts.progress.step if parts.progress.window else -1
        self._saved_stays = not parts.from_ephemeral
        self._resumed_at = parts.clock()
        self._spent_before = parts.progress.spent_seconds

    def run(self) -> Outcome:
        """Trains to the end.

        Raises:
            SurefootError: whatever the update, the data or a save raises; nothing was published
                after a non-finite update.
        """
        while True:
            try:
                return self._run_or_leave()
            except RolledBack as asked:
                self._roll_back(asked.roll_back)

    def _run_or_leave(self) -> Outcome:
        try:
            return self._run()
        except CutShort:
            self.parts.log.ledger.switch(Phase.REST)
            # An evaluation or a wait for data was left: a resume does it again, from here.
            self.parts.log.settle()
            return self._stopped(self.parts.stop_request.at_boundary() or "stopped")

    def _run(self) -> Outcome:
        parts = self.parts
        end = self._resume_evaluation() or self._ended_before(self._mark())
        if end is not None:
            return self._finish(Status.FINISHED, end)
        if stop := parts.stop_request.at_boundary():
            return self._stopped(stop)
        save_first = parts.slow_first_update or parts.saves_first
        if save_first and self._saved_step != parts.progress.step:
            self._save()
        before = self._mark()
        next_due = self._next_due(before)
        update = self._first_update if parts.slow_first_update else parts.update
        switch = parts.log.ledger.switch
        # Closing the generator ends the loader's workers also when an update raises.
        with closing(parts.open_windows(parts.progress.cursor)) as windows:  # type: ignore[type-var]
            switch(Phase.LAUNCH)
            for window in windows:
                update(window)
                update = parts.update
                stop = parts.stop_request.after_update()
                if not stop and not self._may_be_due(next_due, window):
                    continue
                parts.log.settle()
                switch(Phase.REST)
                parts.log.book_times()
                now = self._mark()
                end = self._at_boundary(before, now)
                before, next_due = now, self._next_due(now)
                if end:
                    return self._finish(Status.FINISHED, end)
                if stop := stop or parts.stop_request.at_boundary():
                    return self._stopped(stop)
                switch(Phase.LAUNCH)
        switch(Phase.REST)
        parts.log.settle()
        return self._finish(Status.FINISHED, "the data is at its end")

    def _roll_back(self, roll_back: RollBack) -> None:
        # The time spent is not undone: `_mark` counts it on.
        self.parts.log.ledger.switch(Phase.REST)
        self.parts.log.book_times()
        with self.parts.log.ledger.phase(Phase.CHECKPOINT):
            self.parts.roll_back(roll_back)
        self._mark()
        self._saved_step, self._saved_stays = self.parts.progress.step, True
        self.parts.log.restart_clock()

    def _first_update(self, window: Window) -> None:
        # It compiles, for minutes perhaps. Where it was left, nothing has been counted, and the
        # checkpoint that the process began from stands.
        with self.parts.stop_request.cutting(), self.parts.log.ledger.phase(Phase.COMPILE):
            self.parts.update(window)

    def _resume_evaluation(self) -> str | None:
        """Does the evaluation that a stop has cut; returns a reason to finish, or None."""
        if not self.parts.progress.evaluation_due:
            return None
        end = self._evaluate()
        self._save()
        return end

    def _stopped(self, reason: str) -> Outcome:
        return self._finish(Status.STOPPED, reason)

    def _ended_before(self, before: Mark) -> str | None:
        """Why a resumed run has nothing left to do, or None."""
        if self.parts.horizon.reached(before):
            return "the horizon was reached before"
        return self.parts.decided_before()

    def _next_due(self, now: Mark) -> Mark:
        parts = self.parts
        return frontier(
            (
                parts.horizon,
                parts.evaluate_every,
                parts.save_every,
                parts.ephemeral_every,
                parts.compare_ranks_every,
            ),
            now,
        )

    def _may_be_due(self, next_due: Mark, window: Window) -> bool:
        """Whether anything is due if the update in flight is applied: then it must be settled."""
        progress = self.parts.progress
        return (
            progress.step + 1 >= next_due.step
            or progress.samples + window.samples >= next_due.samples
            or window.cursor_after.epoch >= next_due.epoch
            or (next_due.tokens < inf and self._tokens() >= next_due.tokens)
            or (next_due.seconds < inf and self._mark().seconds >= next_due.seconds)
        )

    def _tokens(self) -> int:
        return self.parts.progress.tokens + self.parts.log.tokens_in_flight()

    def _at_boundary(self, before: Mark, now: Mark) -> str | None:
        """Evaluates and saves what is due; returns a reason to finish, or None."""
        parts = self.parts
        end = None
        is_last = parts.horizon.reached(now)
        if parts.compare_ranks_every.due(before, now):
            # Before anything is saved: what is not equal must not become a checkpoint.
            parts.compare_ranks(parts.progress.step)
        if parts.evaluate_every.due(before, now):
            end = self._evaluate()
        if parts.save_every.due(before, now) or parts.is_best(parts.progress.step):
            self._save()
        elif parts.ephemeral_every.due(before, now) and end is None and not is_last:
            self._save(SaveKind.EPHEMERAL)
        parts.log.restart_clock()
        if end is None and is_last:
            end = "the horizon is reached"
        return end

    def _finish(self, status: Status, reason: str) -> Outcome:
        progress = self.parts.progress
        if status is Status.FINISHED and progress.evaluated_step != progress.step:
            self._evaluate()
            self._saved_step = -1  # The state now holds what this evaluation decided.
        if self._saved_step != progress.step or not self._saved_stays:
            self._save(SaveKind.FINAL)
        self.parts.finish_saves()
        self.parts.log.tell(
            Event(status.value, progress.step, reason, {"epoch": progress.epoch}, time.time())
        )
        return Outcome(status, reason, progress.step)

    def _evaluate(self) -> str | None:
        progress = self.parts.progress
        # Where it is cut, both say so, and the state that is saved then knows what is left.
        evaluated_step, progress.evaluation_due = progress.evaluated_step, True
        progress.evaluated_step = progress.step
        try:
            with self.parts.log.ledger.phase(Phase.EVALUATION):
                end = self.parts.evaluate()
        except CutShort:
            progress.evaluated_step = evaluated_step
            self._saved_step = -1
            raise
        progress.evaluation_due = False
        return end

    def _save(self, kind: SaveKind = SaveKind.REGULAR) -> None:
        self._mark()
        with self.parts.log.ledger.phase(Phase.CHECKPOINT):
            saved = self.parts.save(kind)
        if saved:
            self._saved_step = self.parts.progress.step
            self._saved_stays = kind is not SaveKind.EPHEMERAL

    def _mark(self) -> Mark:
        progress = self.parts.progress
        progress.spent_seconds = self._spent_before + self.parts.clock() - self._resumed_at
        return Mark(
            progress.step,
            progress.samples,
            progress.tokens,
            progress.epoch,
            progress.spent_seconds,
        )
