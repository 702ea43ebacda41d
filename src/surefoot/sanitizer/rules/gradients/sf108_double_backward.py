"""SF108: the same loss is backpropagated twice in one update."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, Site, UpdateTally
from surefoot.sanitizer.state import OptimizerState

LEAST = 3
LEAST_VALUES = 2
Values = tuple[float, ...]


class DoubleBackward(Rule, page=__file__):
    """Two backward passes over one loss graph between zero_grad() and step()."""

    def setup(self) -> None:
        self.doubled = UpdateTally(self.trace)
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
            self.doubled.add(optimizer, site)
            self.latest[optimizer.key] = values
        again = [record for record in optimizer.window if record.graph_uses >= 2]
        if again:
            self.doubled.add(optimizer, again[-1].site)

    def findings(self) -> Findings:
        for optimizer, tally in self.doubled.often(LEAST):
            message = (
                f"In {tally.of(optimizer.steps)} updates a loss that had been"
                " backpropagated already was backpropagated again here."
            )
            yield self.report(message, tally.site, updates=optimizer.steps, doubled=tally.count)


def _gradient(optimizer: OptimizerState) -> Values:
    """The first values of one gradient; empty where too few of them tell anything."""
    for state in optimizer.parameters:
        values = state.witness
        if values is not None:
            return values if sum(map(bool, values)) >= LEAST_VALUES else ()
    return ()
