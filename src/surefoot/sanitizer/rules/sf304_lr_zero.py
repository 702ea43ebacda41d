"""SF304: the learning rate is exactly zero for many updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.trace import Trace

LEAST = 4


class LrZero(Rule):
    """A group's rate is exactly 0 in more than a few S and its gradients are not zero."""

    info = RuleInfo(
        code="SF304",
        slug="lr-zero",
        certainty=Certainty.PROOF,
        title="The learning rate is exactly zero while gradients are computed.",
        observes="Updates of a parameter group with gradients at a rate of exactly 0. Quiet for a"
        " few such updates (first of a warm-up, last of a decay). A group at 0 in all updates is"
        " a hint, as it may be meant, unless all groups of its optimizer are.",
        why="Those updates cost a forward and a backward pass and change nothing.",
        example="LambdaLR(optimizer, lambda s: (s + 1) // warmup if s < warmup else 1)",
        fix="Use true division in the warm-up, or end the run when the schedule ends.",
        source="Follows from the update rule of every optimizer: Δw = −lr · …",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.zero: dict[tuple[int, int], int] = defaultdict(int)
        self.run: dict[tuple[int, int], int] = defaultdict(int)
        self.longest: dict[tuple[int, int], int] = defaultdict(int)
        self.sites: dict[tuple[int, int], Site] = {}
        self.all_zero: dict[int, int] = defaultdict(int)
        """Updates of each optimizer at a rate of 0 in all of its groups."""

    def on_step_begin(self, event: ev.StepBegin) -> None:
        rates = event.optimizer.rates()
        self.all_zero[event.optimizer.key] += bool(rates) and not any(rates)
        for index, group in enumerate(event.optimizer.groups()):
            rate, key = group.get("lr"), (event.optimizer.key, index)
            zero = isinstance(rate, int | float) and rate == 0
            if zero and any(tensor.grad is not None for tensor in group["params"]):
                self.zero[key] += 1
                self.run[key] += 1
                self.longest[key] = max(self.longest[key], self.run[key])
                self.sites[key] = event.site
            elif key in self.run:
                self.run[key] = 0

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            for index in range(16):
                count = self.zero.get((optimizer.key, index), 0)
                # A cosine that touches zero once a cycle is another rule's.
                if self.longest.get((optimizer.key, index), 0) < LEAST:
                    continue
                # A group that rests all the time is frozen; an optimizer that does is for nothing.
                rests = self.all_zero[optimizer.key] >= optimizer.steps
                always = count >= optimizer.steps and not rests
                yield self.report(
                    f"The learning rate of group {index} was exactly 0 in"
                    f" {share(count, optimizer.steps)} updates although there were gradients.",
                    self.sites[optimizer.key, index],
                    certainty=Certainty.HEURISTIC if always else Certainty.PROOF,
                    evidence={"updates": optimizer.steps, "at_zero": count, "group": index},
                )
