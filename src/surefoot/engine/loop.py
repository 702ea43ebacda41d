"""The loop: when to step, evaluate, save and stop. What a step is, it does not know.

At every boundary the order is: settle the update in flight, evaluate, decide, save, stop; so a
checkpoint always holds what the evaluation at its step has decided. The host runs one update ahead
of the device except where something is due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, Protocol

from surefoot.core.reports import Event
from surefoot.engine.cadence import Cadence, Horizon, Mark, frontier
from surefoot.engine.reporting import ReportLog
from surefoot.engine.step import Update
from surefoot.engine.window import Window
from surefoot.state.run_state import Progress


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
    """Says whether somebody asked the run to stop."""

    @property
    def reason(self) -> str | None: ...


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
    save: Callable[[], object]
    save_every: Cadence
    stop_request: StopRequest
    decided_before: Callable[[], str | None] = lambda: None
    """Why evaluations before a resume have ended the run already, or None."""


class Loop:
    """Runs updates until the horizon, a decision or a request ends the run."""

    def __init__(self, parts: LoopParts) -> None:
        self.parts = parts
        self._saved_step = parts.progress.step if parts.progress.window else -1
        self._resumed_at = time.monotonic()
        self._spent_before = parts.progress.spent_seconds

    def run(self) -> Outcome:
        """Trains to the end.

        Raises:
            SurefootError: whatever the update, the data or a save raises; nothing was published
                after a non-finite update.
        """
        parts = self.parts
        before = self._mark()
        end = self._ended_before(before)
        if end is not None:
            return self._finish(Status.FINISHED, end)
        if parts.stop_request.reason is not None:
            return self._finish(Status.STOPPED, parts.stop_request.reason)
        next_due = self._next_due(before)
        # Closing the generator ends the loader's workers also when an update raises.
        with closing(parts.open_windows(parts.progress.cursor)) as windows:  # type: ignore[type-var]
            for window in windows:
                parts.update(window)
                stop = parts.stop_request.reason
                if not stop and not self._may_be_due(next_due, window):
                    continue
                parts.log.settle()
                now = self._mark()
                end = self._at_boundary(before, now)
                before, next_due = now, self._next_due(now)
                if end or stop:
                    status = Status.FINISHED if end else Status.STOPPED
                    return self._finish(status, end or stop or "")
        parts.log.settle()
        return self._finish(Status.FINISHED, "the data is at its end")

    def _ended_before(self, before: Mark) -> str | None:
        """Why a resumed run has nothing left to do, or None."""
        if self.parts.horizon.reached(before):
            return "the horizon was reached before"
        return self.parts.decided_before()

    def _next_due(self, now: Mark) -> Mark:
        parts = self.parts
        return frontier((parts.horizon, parts.evaluate_every, parts.save_every), now)

    def _may_be_due(self, next_due: Mark, window: Window) -> bool:
        """Whether anything is due if the update in flight is applied: then it must be settled."""
        progress = self.parts.progress
        return (
            progress.step + 1 >= next_due.step
            or progress.samples + window.samples >= next_due.samples
            or window.cursor_after.epoch >= next_due.epoch
            or (next_due.tokens < inf and progress.tokens + _tokens(window) >= next_due.tokens)
            or (next_due.seconds < inf and self._mark().seconds >= next_due.seconds)
        )

    def _at_boundary(self, before: Mark, now: Mark) -> str | None:
        """Evaluates and saves what is due; returns a reason to finish, or None."""
        parts = self.parts
        end = None
        if parts.evaluate_every.due(before, now):
            end = self._evaluate()
        if parts.save_every.due(before, now):
            self._save()
        parts.log.restart_clock()
        if end is None and parts.horizon.reached(now):
            end = "the horizon is reached"
        return end

    def _finish(self, status: Status, reason: str) -> Outcome:
        progress = self.parts.progress
        if status is Status.FINISHED and progress.evaluated_step != progress.step:
            self._evaluate()
            self._saved_step = -1  # The state now holds what this evaluation decided.
        if self._saved_step != progress.step:
            self._save()
        self.parts.log.tell(
            Event(status.value, progress.step, reason, {"epoch": progress.epoch}, time.time())
        )
        return Outcome(status, reason, progress.step)

    def _evaluate(self) -> str | None:
        self.parts.progress.evaluated_step = self.parts.progress.step
        return self.parts.evaluate()

    def _save(self) -> None:
        self._mark()
        self.parts.save()
        self._saved_step = self.parts.progress.step

    def _mark(self) -> Mark:
        progress = self.parts.progress
        progress.spent_seconds = self._spent_before + time.monotonic() - self._resumed_at
        return Mark(
            progress.step,
            progress.samples,
            progress.tokens,
            progress.epoch,
            progress.spent_seconds,
        )


def _tokens(window: Window) -> int:
    return round(sum(window.weights.values()))
