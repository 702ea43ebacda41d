"""SF201: gradients are cleared between the micro-batches of a window."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import is_homogeneous
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site, Tally, share

LEAST = 3


class AccumWiped(Rule):
    """k B per S, but a Z after every B."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.tallies: dict[int, Tally] = defaultdict(Tally)
        self.sizes: dict[int, int] = {}
        self.wipes: dict[int, Site] = {}

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        size = len(optimizer.window)
        # The wipe after the last micro-batch, if any, is another rule's.
        if event.closure or size < 2 or optimizer.wipes < size - 1:
            return
        if any(state.unknown for state in optimizer.parameters):
            return
        if is_homogeneous(optimizer.window):
            self.tallies[optimizer.key].add(optimizer.wipe_site)
            self.sizes[optimizer.key] = size

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, optimizer.steps):
                continue
            if tally.count < 0.5 * optimizer.steps:
                continue
            size = self.sizes[optimizer.key]
            yield self.report(
                f"Each update follows {size} backward passes, but the gradients are cleared here"
                f" between them, in {share(tally.count, optimizer.steps)} updates:"
                f" {size - 1} of {size} micro-batches are lost.",
                tally.site,
                updates=optimizer.steps,
                wiped=tally.count,
                window=size,
            )
