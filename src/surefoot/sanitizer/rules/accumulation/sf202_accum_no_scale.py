"""SF202: mean losses are summed over a window."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import is_homogeneous, main_factor
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Tally, share

LEAST = 2


class AccumNoScale(Rule):
    """k > 1 B per S, each of the mean-reduced loss itself, and no division of gradients."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.tallies: dict[int, Tally] = defaultdict(Tally)
        self.windows: dict[int, int] = defaultdict(int)
        self.sizes: dict[int, int] = {}

    def on_step_end(self, event: ev.StepEnd) -> None:
        update = event.update
        if len(update.backwards) < 2 or update.wipes or not is_homogeneous(update.backwards):
            return
        self.windows[event.optimizer.key] += 1
        factors = [main_factor(record) for record in update.backwards]
        if not update.touched and all(f is not None and abs(f - 1.0) < 1e-6 for f in factors):
            self.tallies[event.optimizer.key].add(update.backwards[0].site)
            self.sizes[event.optimizer.key] = len(update.backwards)

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            windows = self.windows[optimizer.key]
            if tally is None or tally.count < LEAST or tally.count < 0.8 * windows:
                continue
            yield self.report(
                f"In {share(tally.count, windows)} windows of {self.sizes[optimizer.key]}"
                " micro-batches the mean loss is backpropagated undivided: the gradients add up"
                f" to {self.sizes[optimizer.key]} times their mean.",
                tally.site,
                windows=windows,
                undivided=tally.count,
            )
