"""SF108: the same loss is backpropagated twice in one update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, Tally, share
from surefoot.sanitizer.state import OptimizerState
from surefoot.sanitizer.trace import Trace

LEAST = 3
LEAST_VALUES = 2


Values = tuple[float, ...]


class DoubleBackward(Rule):
    """Two B over the same loss graph between Z and S."""

    info = RuleInfo(
        code="SF108",
        slug="double-backward",
        certainty=Certainty.STRONG,
        title="The same loss is backpropagated twice in one update.",
        observes="Two backward passes from the same node of the graph that both feed one step; or"
        " from two lines, of which the second adds, number by number, exactly what the first did,"
        " while batches differ from update to update. Quiet for different losses over a kept graph,"
        " and for autograd.grad.",
        why="The gradient counts twice: the learning rate and the clip limit are not what they"
        " seem.",
        example="loss.backward(retain_graph=True)\nloss.backward()\noptimizer.step()",
        fix="Call backward() once per loss; drop retain_graph=True.",
        source="Follows from autograd's accumulation into .grad.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.tallies: dict[int, Tally] = defaultdict(Tally)
        self.single: dict[int, tuple[int, Values]] = {}
        """Per optimizer: line and gradient of the only backward pass of the open window."""
        self.twice: dict[int, tuple[Site, Values]] = {}
        """Per optimizer: where the second one added the same, and the sum."""
        self.latest: dict[int, Values] = {}

    def on_backward_end(self, event: ev.BackwardEnd) -> None:
        for optimizer in event.optimizers:
            key, passes = optimizer.key, len(optimizer.window)
            values = _gradient(optimizer) if passes <= 2 else ()
            if passes == 1:
                self.single[key] = event.site.line, values
                self.twice.pop(key, None)
            elif passes == 2 and key in self.single:
                line, first = self.single.pop(key)
                if line != event.site.line and first and values == tuple(2 * v for v in first):
                    self.twice[key] = event.site, values
            else:
                self.twice.pop(key, None)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        if event.closure or optimizer.wipes:
            return
        site, values = self.twice.pop(optimizer.key, (None, ()))
        if site is not None and values != self.latest.get(optimizer.key):
            self.tallies[optimizer.key].add(site)
            self.latest[optimizer.key] = values
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


def _gradient(optimizer: OptimizerState) -> Values:
    """The first values of one gradient; empty where too few of them tell anything."""
    for state in optimizer.parameters:
        values = state.witness
        if values is not None:
            return values if sum(map(bool, values)) >= LEAST_VALUES else ()
    return ()
