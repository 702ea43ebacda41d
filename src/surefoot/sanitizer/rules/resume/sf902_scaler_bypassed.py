"""SF902: the optimizer steps on gradients that carry the loss scale."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, Tally, share

LEAST = 3


class ScalerBypassed(Rule, page=__file__):
    """An optimizer steps on gradients of a scaled loss, and not by scaler.step()."""

    def setup(self) -> None:
        self.tallies: dict[int, Tally] = defaultdict(Tally)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        if "scaler" in self.trace.causes:
            return
        for state in event.optimizer.parameters:
            if state.scale_pending and state.contributions > state.used and not state.unknown:
                self.tallies[event.optimizer.key].add(event.site)
                return

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, optimizer.steps):
                continue
            message = (
                f"{share(tally.count, optimizer.steps)} steps of {optimizer.kind} used gradients"
                " that still carried the loss scale."
            )
            yield self.report(message, tally.site, updates=optimizer.steps, scaled=tally.count)
