"""SF106: gradients of earlier updates are used again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Rule, RuleInfo, Tally, share
from surefoot.sanitizer.trace import Trace

LEAST = 3


class MissingZeroGrad(Rule):
    """At S the buffers hold contributions that an earlier S has used, and new ones."""

    info = RuleInfo(
        code="SF106",
        slug="missing-zero-grad",
        certainty=Certainty.STRONG,
        title="Gradients are not cleared between updates and pile up.",
        observes="At a step, gradient buffers that hold backward passes which an earlier step has"
        " used, plus new ones. Quiet for accumulation, closures, gradients cleared or changed by"
        " hand.",
        why="Each update moves along the sum of all gradients so far: an unintended momentum"
        " without decay, whose length grows with every step.",
        example="for x, y in loader:\n    loss_fn(model(x), y).backward()\n    optimizer.step()",
        fix="Call optimizer.zero_grad() once per update, before the first backward().",
        source="Follows from autograd's accumulation into .grad.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.tallies: dict[int, Tally] = defaultdict(Tally)
        self.most: dict[int, int] = defaultdict(int)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        if event.closure or event.inside_backward:
            return
        optimizer = event.optimizer
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

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < LEAST or tally.count < 0.2 * optimizer.steps:
                continue
            yield self.report(
                f"{share(tally.count, optimizer.steps)} steps of {optimizer} used gradients that"
                f" an earlier step had used already; up to {self.most[optimizer.key]} backward"
                " passes were summed in one buffer.",
                tally.site,
                evidence={
                    "updates": optimizer.steps,
                    "updates_with_used_gradients": tally.count,
                    "most_passes_in_one_buffer": self.most[optimizer.key],
                },
            )
