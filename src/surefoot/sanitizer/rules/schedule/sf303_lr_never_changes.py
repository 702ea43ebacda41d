"""SF303: a scheduler exists but does not reach the optimizer that trains."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.rounds import Rounds
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo
from surefoot.sanitizer.state import OptimizerState, SchedulerState

LEAST_UPDATES = 20
LEAST_EPOCHS = 2
LEAST_STEPS = 3
LATE_EPOCHS = 3


class LrNeverChanges(Rule):
    """Scheduler object exists, L never called; or its optimizer is not the one stepping."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.completed = False
        self.sharing: dict[int, int] = {}
        self.first: dict[int, int] = {}
        """Updates of a scheduler's optimizer before its first step."""
        self.rounds = self.use(Rounds)

    def on_scheduler_step(self, event: ev.SchedulerStep) -> None:
        state = event.scheduler
        if state.optimizer is not None:
            self.first.setdefault(state.key, state.optimizer.steps)
        if state.key in self.sharing or state.optimizer is None:
            return
        if state.steps >= LEAST_STEPS and self._idle(state):
            other = self._other(state.optimizer)
            if other is not None:
                self.sharing[state.key] = other.key

    def on_run_ended(self, event: ev.RunEnded) -> None:
        self.completed = event.outcome == "completed"

    def _too_late(
        self, state: SchedulerState, optimizer: OptimizerState, updates: int, length: float
    ) -> bool:
        """Whether no update came after its first step, in a run of several epochs."""
        if not self.completed or self.first.get(state.key) != optimizer.steps or updates == 0:
            return False
        return length > 0 and updates >= LATE_EPOCHS * length

    def _idle(self, state: SchedulerState) -> bool:
        assert state.optimizer is not None
        return state.optimizer.steps == state.optimizer_steps_at_creation

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
            optimizer = state.optimizer
            if optimizer is None or state.inner:
                continue
            updates = optimizer.steps - state.optimizer_steps_at_creation
            ends = max((loader.ends for loader in self.trace.loaders if loader.steps), default=0)
            length = self.rounds.length()
            epochs = max(ends, updates / length if length else 0)
            enough = epochs >= LEAST_EPOCHS and updates >= LEAST_STEPS
            if self._too_late(state, optimizer, updates, length):
                yield self.report(
                    f"{state} was stepped only after the last of {updates} updates of its"
                    " optimizer.",
                    state.last_site,
                    updates=updates,
                    scheduler_steps=state.steps,
                    fix="Call scheduler.step() inside the loop.",
                )
            elif state.steps == 0 and self.completed and (enough or updates >= LEAST_UPDATES):
                if enough or "Plateau" not in state.kind:
                    yield self.report(
                        f"{state} was never stepped in {updates} updates of its optimizer.",
                        state.site,
                        updates=updates,
                        scheduler_steps=0,
                        fix="Call scheduler.step() after optimizer.step(), or remove it.",
                    )
            elif state.key in self.sharing and updates == 0:
                other = next(o for o in self.trace.optimizers if o.key == self.sharing[state.key])
                yield self.report(
                    f"{state} was stepped {state.steps} times, but its optimizer"
                    f" (line {optimizer.site.line}) made no step since: {other} steps the same"
                    f" parameters, {other.steps} times at an unscheduled rate.",
                    state.site,
                    scheduler_steps=state.steps,
                    steps_of_its_optimizer=0,
                    steps_of_the_other=other.steps,
                )
