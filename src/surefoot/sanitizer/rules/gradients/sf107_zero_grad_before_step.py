"""SF107: gradients are cleared between backward and step."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, UpdateTally

LEAST = 3


class ZeroGradBeforeStep(Rule, page=__file__):
    """Between the last backward() and step() every gradient became None or zero."""

    def setup(self) -> None:
        self.empty = UpdateTally(self.trace)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        if event.closure or event.inside_backward or not optimizer.window:
            return
        if not any(s.contributions or s.unknown for s in optimizer.parameters):
            self.empty.add(optimizer, optimizer.wipe_site if optimizer.wipes else event.site)

    def findings(self) -> Findings:
        for optimizer, tally in self.empty.often(LEAST):
            message = (
                f"In {tally.of(optimizer.steps)} updates the gradients that backward() at line"
                f" {optimizer.last_backward_site.line} computed were cleared here before"
                f" {optimizer.kind}.step() at line {optimizer.last_step_site.line} could use them."
            )
            yield self.report(
                message, tally.site, updates=optimizer.steps, empty_updates=tally.count
            )
