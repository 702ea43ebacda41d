"""SF303: a scheduler exists but does not reach the optimizer that trains."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.rounds import Rounds
from surefoot.sanitizer.rules.base import Finding, Findings, Rule
from surefoot.sanitizer.state import OptimizerState, SchedulerState

LEAST_UPDATES = 20
LEAST_EPOCHS = 2
LEAST_STEPS = 3
LATE_EPOCHS = 3


class LrNeverChanges(Rule, page=__file__):
    """A scheduler is never stepped, or its optimizer is not the one that steps."""

    def setup(self) -> None:
        self.rounds = self.use(Rounds)
        self.other: dict[int, OptimizerState] = {}
        """By scheduler: the optimizer that steps the parameters in place of its own."""
        self.first: dict[int, int] = {}
        """By scheduler: updates of its optimizer before its first step."""

    def on_scheduler_step(self, event: ev.SchedulerStep) -> None:
        state, optimizer = event.scheduler, event.scheduler.optimizer
        if optimizer is None:
            return
        self.first.setdefault(state.key, optimizer.steps)
        if state.key not in self.other and state.steps >= LEAST_STEPS and not state.updates:
            other = self._other(optimizer)
            if other is not None:
                self.other[state.key] = other

    def _other(self, optimizer: OptimizerState) -> OptimizerState | None:
        keys = {parameter.key for parameter in optimizer.parameters}
        groups = {id(group) for group in optimizer.groups()}
        for other in self.trace.optimizers:
            is_later = other.key != optimizer.key and other.last_step > optimizer.last_step
            # A wrapper such as Lookahead steps the very groups whose rates the scheduler sets.
            is_later = is_later and not any(id(group) in groups for group in other.groups())
            if is_later and any(parameter.key in keys for parameter in other.parameters):
                return other
        return None

    def findings(self) -> Findings:
        for state in self.trace.schedulers:
            if state.optimizer is not None and not state.inner:
                finding = self._judge(state, state.optimizer)
                if finding is not None:
                    yield finding

    def _judge(self, state: SchedulerState, optimizer: OptimizerState) -> Finding | None:
        updates, length = state.updates, self.rounds.length()
        ends = max((loader.ends for loader in self.trace.loaders if loader.steps), default=0)
        epochs = max(ends, updates / length if length else 0)
        enough = epochs >= LEAST_EPOCHS and updates >= LEAST_STEPS
        is_long = 0 < LATE_EPOCHS * length <= updates
        if self.trace.completed and is_long and self.first.get(state.key) == optimizer.steps:
            return self.report(
                f"{state} was stepped only after the last of {updates} updates of its optimizer.",
                state.last_site,
                fix="Call scheduler.step() inside the loop.",
                updates=updates,
                scheduler_steps=state.steps,
            )
        if not state.steps and self.trace.completed and (enough or updates >= LEAST_UPDATES):
            if not enough and "Plateau" in state.kind:
                return None
            return self.report(
                f"{state} was never stepped in {updates} updates of its optimizer.",
                state.site,
                fix="Call scheduler.step() after optimizer.step(), or remove it.",
                updates=updates,
                scheduler_steps=0,
            )
        other = self.other.get(state.key)
        if other is None or updates:
            return None
        message = (
            f"{state} was stepped {state.steps} times, but its optimizer (line"
            f" {optimizer.site.line}) made no step since: {other} steps the same parameters,"
            f" {other.steps} times at an unscheduled rate."
        )
        return self.report(
            message,
            state.site,
            scheduler_steps=state.steps,
            steps_of_its_optimizer=0,
            steps_of_the_other=other.steps,
        )
