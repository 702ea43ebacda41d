"""SF106: gradients of earlier updates are used again, with new ones or all alone."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, UpdateTally
from surefoot.sanitizer.state import OptimizerState

LEAST = 3
SHARE = 0.2
"""Of the updates."""


class MissingZeroGrad(Rule, page=__file__):
    """At a step the buffers hold backward passes that an earlier step has used."""

    def setup(self) -> None:
        self.stale, self.again = UpdateTally(self.trace), UpdateTally(self.trace)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        if event.closure or event.inside_backward:
            return
        optimizer = event.optimizer
        if _steps_again(optimizer):
            self.again.add(optimizer, event.site)
            return
        fed = [s for s in optimizer.parameters if s.contributions > s.used and not s.unknown]
        stale = [state.contributions for state in fed if state.used]
        if stale and len(stale) >= 0.5 * len(fed):
            self.stale.add(optimizer, event.site, max(stale))

    def findings(self) -> Findings:
        for optimizer, tally in self.again.often(LEAST, SHARE, short_runs=False):
            message = (
                f"{tally.of(optimizer.steps)} steps of {optimizer} used the very gradients of the"
                " step before: no backward pass lay between them."
            )
            yield self.report(
                message,
                tally.site,
                fix="Call step() once per update.",
                updates=optimizer.steps,
                repeated_steps=tally.count,
            )
        for optimizer, tally in self.stale.often(LEAST, SHARE, short_runs=False):
            message = (
                f"{tally.of(optimizer.steps)} steps of {optimizer} used gradients that an earlier"
                f" step had used already; up to {tally.most} backward passes were summed in one"
                " buffer."
            )
            yield self.report(
                message,
                tally.site,
                updates=optimizer.steps,
                updates_with_used_gradients=tally.count,
                most_passes_in_one_buffer=tally.most,
            )


def _steps_again(optimizer: OptimizerState) -> bool:
    """Whether nothing happened to any gradient since the latest step of this optimizer."""
    if not 0 < optimizer.last_backward < optimizer.last_step:
        return False
    filled = [state for state in optimizer.parameters if state.contributions]
    untouched = (s.used == s.contributions and not s.touched for s in filled)
    return bool(filled) and all(untouched)
