"""SF304: the learning rate is exactly zero for many updates."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Certainty, Findings, Rule, RuleInfo, Site, share

LEAST = 4


class LrZero(Rule):
    """A group's rate is exactly 0 in more than a few S and its gradients are not zero."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.zero: dict[tuple[int, int], int] = defaultdict(int)
        self.run: dict[tuple[int, int], int] = defaultdict(int)
        self.longest: dict[tuple[int, int], int] = defaultdict(int)
        self.sites: dict[tuple[int, int], Site] = {}
        self.alone: dict[tuple[int, int], int] = defaultdict(int)
        """Updates of each group at a rate of 0 while another one of its optimizer had a rate."""

    def on_step_begin(self, event: ev.StepBegin) -> None:
        rates = event.optimizer.rates()
        for index, group in enumerate(event.optimizer.groups()):
            rate, key = group.get("lr"), (event.optimizer.key, index)
            zero = isinstance(rate, int | float) and rate == 0
            if zero and any(tensor.grad is not None for tensor in group["params"]):
                self.zero[key] += 1
                self.run[key] += 1
                self.alone[key] += any(rates)
                self.longest[key] = max(self.longest[key], self.run[key])
                self.sites[key] = event.site
            elif key in self.run:
                self.run[key] = 0

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            for index in range(16):
                count = self.zero.get((optimizer.key, index), 0)
                # A cosine that touches zero once a cycle is another rule's.
                if self.longest.get((optimizer.key, index), 0) < LEAST:
                    continue
                # A group that rests while others do not is frozen, for a stage or for good.
                meant = 2 * self.alone[optimizer.key, index] >= count
                yield self.report(
                    f"The learning rate of group {index} was exactly 0 in"
                    f" {share(count, optimizer.steps)} updates although there were gradients.",
                    self.sites[optimizer.key, index],
                    certainty=Certainty.HEURISTIC if meant else Certainty.PROOF,
                    updates=optimizer.steps,
                    at_zero=count,
                    group=index,
                )
