"""SF107: gradients are cleared between backward and step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Rule, RuleInfo, Tally, share
from surefoot.sanitizer.trace import Trace

LEAST = 3


class ZeroGradBeforeStep(Rule):
    """Between last B and S every gradient became None or zero."""

    info = RuleInfo(
        code="SF107",
        slug="zero-grad-before-step",
        certainty=Certainty.PROOF,
        title="Gradients are cleared after backward() and before step().",
        observes="A step for which backward() computed gradients, all of which are None or"
        " cleared when it begins. Quiet for optimizers that step inside backward().",
        why="The step sees no gradient: the weights stay as they are, or only decay.",
        example="loss.backward()\noptimizer.zero_grad()\noptimizer.step()",
        fix="Clear the gradients before backward() or after step().",
        source="Follows from what zero_grad() and step() do.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.tallies: dict[int, Tally] = defaultdict(Tally)
        self.zero_line: dict[int, int] = {}

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        if event.closure or event.inside_backward or not optimizer.window:
            return
        if not any(s.contributions or s.unknown for s in optimizer.parameters):
            site = optimizer.wipe_site if optimizer.wipes else event.site
            self.tallies[optimizer.key].add(site)

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, optimizer.steps):
                continue
            yield self.report(
                f"In {share(tally.count, optimizer.steps)} updates the gradients that backward()"
                f" at line {optimizer.last_backward_site.line} computed were cleared here before"
                f" {optimizer.kind}.step() at line {optimizer.last_step_site.line} could use them.",
                tally.site,
                evidence={"updates": optimizer.steps, "empty_updates": tally.count},
            )
