"""SF301: the schedule moves on before the optimizer has used its value."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, Site, Tally

LEAST = 3
SHARE = 0.9
ACCUMULATES = 1.5
"""Steps of the scheduler per update from which it is stepped per micro-batch: another rule's."""
MOST_EARLY = 100


class SchedBeforeOptim(Rule, page=__file__):
    """scheduler.step() before the optimizer's first step, or before its step in every update."""

    def setup(self) -> None:
        self.early: dict[int, list[Site]] = defaultdict(list)
        self.waiting: dict[int, tuple[Site, int]] = {}
        self.between: dict[int, Tally] = defaultdict(Tally)

    def on_scheduler_step(self, event: ev.SchedulerStep) -> None:
        state = event.scheduler
        optimizer = state.optimizer
        if state.inner or optimizer is None or optimizer.skipped:
            return
        if not optimizer.has_stepped and len(self.early[state.key]) < MOST_EARLY:
            self.early[state.key].append(event.site)
        if optimizer.window and optimizer.last_backward > optimizer.last_step:
            self.waiting[state.key] = event.site, optimizer.key

    def on_step_end(self, event: ev.StepEnd) -> None:
        for key, (site, optimizer) in list(self.waiting.items()):
            if optimizer == event.optimizer.key:
                self.between[key].add(site)
                del self.waiting[key]

    def findings(self) -> Findings:
        for state in self.trace.schedulers:
            optimizer, tally = state.optimizer, self.between[state.key]
            if optimizer is None or state.inner or not optimizer.steps or not state.steps:
                continue
            early = self.early[state.key]
            every = tally.count >= max(LEAST, SHARE * optimizer.steps)
            # One step before each update is an order; many at once wind a schedule forward.
            first = len(early) == 1 and state.steps > 1 and tally.count == 0
            if state.steps > ACCUMULATES * optimizer.steps or not (every or first):
                continue
            counted = f"{tally.of(optimizer.steps)} updates" if every else "the first update"
            message = (
                f"{state.kind}.step() ran before {optimizer.kind}.step() (line"
                f" {optimizer.last_step_site.line}) in {counted}: the first learning rate was never"
                " used."
            )
            yield self.report(
                message,
                tally.site if every else early[0],
                updates=optimizer.steps,
                scheduler_steps=state.steps,
                between_backward_and_step=tally.count,
            )
