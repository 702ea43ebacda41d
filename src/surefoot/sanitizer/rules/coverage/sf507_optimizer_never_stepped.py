"""SF507: an optimizer's parameters get gradients, but it never steps."""

from __future__ import annotations

from collections import Counter

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import some_values
from surefoot.sanitizer.rules.base import Findings, Rule
from surefoot.sanitizer.state import OptimizerState

LEAST = 10
LOOKS = 50


class OptimizerNeverStepped(Rule, page=__file__):
    """The parameters of an optimizer get gradients, and it never steps."""

    def setup(self) -> None:
        self.zeroed: Counter[int] = Counter()
        self.before: dict[int, tuple[float, ...]] = {}
        self.moving: set[int] = set()
        """Optimizers without a step whose weights changed between two calls of zero_grad."""

    def on_zero_grad(self, event: ev.ZeroGrad) -> None:
        for optimizer in self.trace.optimizers:
            if event.parameters is optimizer.parameters:
                self.zeroed[optimizer.key] += 1
                if not optimizer.has_stepped and self.zeroed[optimizer.key] <= LOOKS:
                    self._look(optimizer)

    def _look(self, optimizer: OptimizerState) -> None:
        tensors = (state.ref() for state in optimizer.parameters)
        tensor = next((tensor for tensor in tensors if tensor is not None), None)
        values = () if tensor is None else some_values(tensor)
        if self.before.setdefault(optimizer.key, values) != values:
            self.moving.add(optimizer.key)

    def findings(self) -> Findings:
        if not self.trace.completed:
            return
        stepped = {s.key for o in self.trace.optimizers if o.steps for s in o.parameters}
        for optimizer in self.trace.optimizers:
            if optimizer.has_stepped or optimizer.skipped:
                continue
            lost = 0 if optimizer.key in self.moving else optimizer.wipes
            if lost < LEAST and any(state.key in stepped for state in optimizer.parameters):
                continue
            fed = max((state.backwards for state in optimizer.parameters), default=0)
            # Nobody stepped, and nobody prepared to: a script that only measures gradients.
            prepared = bool(self.trace.schedulers) or self.zeroed[optimizer.key] >= LEAST
            if fed < LEAST or (not stepped and not prepared and fed < 5 * LEAST):
                continue
            message = (
                f"{optimizer} never stepped, although its parameters got gradients from {fed}"
                " backward passes."
            )
            yield self.report(
                message, optimizer.site, backward_passes=fed, updates_of_others=self.trace.updates
            )
