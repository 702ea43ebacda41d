"""SF202: mean losses are summed over a window."""

from __future__ import annotations

from collections import Counter

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import is_homogeneous, main_factor
from surefoot.sanitizer.rules.base import Findings, Rule, UpdateTally

LEAST = 2
SHARE = 0.8
"""Of the windows."""


class AccumNoScale(Rule, page=__file__):
    """Several backward passes per step(), of the mean loss itself; nobody divides gradients."""

    def setup(self) -> None:
        self.undivided = UpdateTally(self.trace)
        self.windows: Counter[int] = Counter()

    def on_step_end(self, event: ev.StepEnd) -> None:
        update = event.update
        if len(update.backwards) < 2 or update.wipes or not is_homogeneous(update.backwards):
            return
        self.windows[event.optimizer.key] += 1
        factors = [main_factor(record) for record in update.backwards]
        if not update.touched and all(f is not None and abs(f - 1.0) < 1e-6 for f in factors):
            self.undivided.add(event.optimizer, update.backwards[0].site, len(factors))

    def findings(self) -> Findings:
        for optimizer, tally in self.undivided.often(LEAST, short_runs=False):
            windows = self.windows[optimizer.key]
            if tally.count < SHARE * windows:
                continue
            message = (
                f"In {tally.of(windows)} windows of {tally.latest} micro-batches the mean loss is"
                f" backpropagated undivided: the gradients add up to {tally.latest} times their"
                " mean."
            )
            yield self.report(message, tally.site, windows=windows, undivided=tally.count)
