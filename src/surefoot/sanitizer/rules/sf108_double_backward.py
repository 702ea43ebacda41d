"""SF108: the same loss is backpropagated twice in one update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Rule, RuleInfo, Tally, share
from surefoot.sanitizer.trace import Trace

LEAST = 3


class DoubleBackward(Rule):
    """Two B over the same loss graph between Z and S."""

    info = RuleInfo(
        code="SF108",
        slug="double-backward",
        certainty=Certainty.STRONG,
        title="The same loss is backpropagated twice in one update.",
        observes="Two backward passes from the same node of the graph that both feed one step."
        " Quiet for different losses over a kept graph, and for autograd.grad.",
        why="The gradient counts twice: the learning rate and the clip limit are not what they"
        " seem.",
        example="loss.backward(retain_graph=True)\nloss.backward()\noptimizer.step()",
        fix="Call backward() once per loss; drop retain_graph=True.",
        source="Follows from autograd's accumulation into .grad.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.tallies: dict[int, Tally] = defaultdict(Tally)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        if event.closure or optimizer.wipes:
            return
        again = [record for record in optimizer.window if record.graph_uses >= 2]
        if again:
            self.tallies[optimizer.key].add(again[-1].site)

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, optimizer.steps):
                continue
            yield self.report(
                f"In {share(tally.count, optimizer.steps)} updates a loss that had been"
                " backpropagated already was backpropagated again here.",
                tally.site,
                evidence={"updates": optimizer.steps, "doubled": tally.count},
            )
