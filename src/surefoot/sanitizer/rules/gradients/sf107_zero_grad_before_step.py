"""SF107: gradients are cleared between backward and step."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Tally, share

LEAST = 3


class ZeroGradBeforeStep(Rule):
    """Between last B and S every gradient became None or zero."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.tallies: dict[int, Tally] = defaultdict(Tally)
        self.zero_line: dict[int, int] = {}

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        if event.closure or event.inside_backward or not optimizer.window:
            return
        if not any(s.contributions or s.unknown for s in optimizer.parameters):
            site = optimizer.wipe_site if optimizer.wipes else event.site
            self.tallies[optimizer.key].add(site)

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, optimizer.steps):
                continue
            yield self.report(
                f"In {share(tally.count, optimizer.steps)} updates the gradients that backward()"
                f" at line {optimizer.last_backward_site.line} computed were cleared here before"
                f" {optimizer.kind}.step() at line {optimizer.last_step_site.line} could use them.",
                tally.site,
                updates=optimizer.steps,
                empty_updates=tally.count,
            )
