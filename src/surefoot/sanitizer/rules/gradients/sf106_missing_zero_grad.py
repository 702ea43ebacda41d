"""SF106: gradients of earlier updates are used again, with new ones or all alone."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Tally, share
from surefoot.sanitizer.state import OptimizerState

LEAST = 3


class MissingZeroGrad(Rule):
    """At S the buffers hold contributions that an earlier S has used."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.tallies: dict[int, Tally] = defaultdict(Tally)
        self.most: dict[int, int] = defaultdict(int)
        self.again: dict[int, Tally] = defaultdict(Tally)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        if event.closure or event.inside_backward:
            return
        optimizer = event.optimizer
        if self._steps_again(optimizer):
            self.again[optimizer.key].add(event.site)
            return
        stale = fed = most = 0
        for state in optimizer.parameters:
            if state.contributions > state.used and not state.unknown:
                fed += 1
                if state.used:
                    stale += 1
                    most = max(most, state.contributions)
        if stale and stale >= 0.5 * fed:
            self.tallies[optimizer.key].add(event.site)
            self.most[optimizer.key] = max(self.most[optimizer.key], most)

    @staticmethod
    def _steps_again(optimizer: OptimizerState) -> bool:
        """Whether nothing happened to any gradient since the latest step of this optimizer."""
        if not 0 < optimizer.last_backward < optimizer.last_step:
            return False
        filled = [state for state in optimizer.parameters if state.contributions]
        return bool(filled) and all(
            state.used == state.contributions and not state.touched for state in filled
        )

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            again = self.again.get(optimizer.key)
            if again is not None and again.count >= max(LEAST, 0.2 * optimizer.steps):
                yield self.report(
                    f"{share(again.count, optimizer.steps)} steps of {optimizer} used the very"
                    " gradients of the step before: no backward pass lay between them.",
                    again.site,
                    updates=optimizer.steps,
                    repeated_steps=again.count,
                    fix="Call step() once per update.",
                )
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < LEAST or tally.count < 0.2 * optimizer.steps:
                continue
            yield self.report(
                f"{share(tally.count, optimizer.steps)} steps of {optimizer} used gradients that"
                f" an earlier step had used already; up to {self.most[optimizer.key]} backward"
                " passes were summed in one buffer.",
                tally.site,
                updates=optimizer.steps,
                updates_with_used_gradients=tally.count,
                most_passes_in_one_buffer=self.most[optimizer.key],
            )
