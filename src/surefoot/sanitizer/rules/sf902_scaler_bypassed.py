"""SF902: the optimizer steps on gradients that carry the loss scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Rule, RuleInfo, Tally, share
from surefoot.sanitizer.trace import Trace

LEAST = 3


class ScalerBypassed(Rule):
    """S with a pending scale and no G.step."""

    info = RuleInfo(
        code="SF902",
        slug="scaler-bypassed",
        certainty=Certainty.PROOF,
        title="optimizer.step() is called on gradients of a scaled loss.",
        observes="A step, not by scaler.step(), on gradients of a loss that a GradScaler scaled and"
        " that nobody unscaled. Quiet for a scale of exactly 1 and gradients divided by hand.",
        why="The gradients are thousands of times too large: SGD jumps, Adam hides it until"
        " epsilon or the clip limit matter, and overflowed steps are not skipped.",
        example="scaler.scale(loss).backward()\noptimizer.step()",
        fix="Call scaler.step(optimizer) and scaler.update().",
        source="torch.amp.GradScaler",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.tallies: dict[int, Tally] = defaultdict(Tally)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        if "scaler" in self.trace.causes:
            return
        for state in event.optimizer.parameters:
            if state.scale_pending and state.contributions > state.used and not state.unknown:
                self.tallies[event.optimizer.key].add(event.site)
                return

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, optimizer.steps):
                continue
            yield self.report(
                f"{share(tally.count, optimizer.steps)} steps of {optimizer.kind} used gradients"
                " that still carried the loss scale.",
                tally.site,
                evidence={"updates": optimizer.steps, "scaled": tally.count},
            )
