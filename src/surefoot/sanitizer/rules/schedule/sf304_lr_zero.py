"""SF304: the learning rate is exactly zero for many updates."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import NOWHERE, Certainty, Findings, Rule, share

LEAST_IN_A_ROW = 4


class _Group:
    """Updates of one parameter group at a rate of 0, with gradients."""

    def __init__(self) -> None:
        self.count = self.run = self.longest = 0
        self.alone = 0
        """Those of them in which another group of its optimizer had a rate."""
        self.site = NOWHERE


class LrZero(Rule, page=__file__):
    """The rate of a group is exactly 0 in more than a few updates that have gradients."""

    def setup(self) -> None:
        self.groups: dict[tuple[int, int], _Group] = defaultdict(_Group)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        rates = event.optimizer.rates()
        for index, parameters in enumerate(event.optimizer.groups()):
            rate, group = parameters.get("lr"), self.groups[event.optimizer.key, index]
            is_zero = isinstance(rate, int | float) and rate == 0
            if is_zero and any(tensor.grad is not None for tensor in parameters["params"]):
                group.count += 1
                group.run += 1
                group.alone += any(rates)
                group.longest = max(group.longest, group.run)
                group.site = event.site
            else:
                group.run = 0

    def findings(self) -> Findings:
        steps = {optimizer.key: optimizer.steps for optimizer in self.trace.optimizers}
        for (key, index), group in self.groups.items():
            # A cosine that touches zero once a cycle is another rule's.
            if group.longest < LEAST_IN_A_ROW:
                continue
            # A group that rests while others do not is frozen, for a stage or for good.
            is_meant = 2 * group.alone >= group.count
            message = (
                f"The learning rate of group {index} was exactly 0 in"
                f" {share(group.count, steps[key])} updates although there were gradients."
            )
            yield self.report(
                message,
                group.site,
                certainty=Certainty.HEURISTIC if is_meant else Certainty.PROOF,
                updates=steps[key],
                at_zero=group.count,
                group=index,
            )
