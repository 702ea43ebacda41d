"""SF204: the short window of an epoch leaks into the next one."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import WindowTally
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Tally


class AccumTailLeak(Rule):
    """A window spans an epoch boundary and has more B than the others."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.windows: dict[int, WindowTally] = defaultdict(WindowTally)
        self.leaks: dict[int, Tally] = defaultdict(Tally)
        self.sizes: dict[int, int] = {}

    def on_step_end(self, event: ev.StepEnd) -> None:
        key = event.optimizer.key
        records = event.update.backwards
        if not self.windows[key].add(event.update):
            return
        loaders = {record.loader for record in records}
        epochs = {record.epoch for record in records}
        usual = self.windows[key].usual
        if len(loaders) == 1 and 0 not in loaders and len(epochs) > 1 and len(records) > usual > 0:
            self.leaks[key].add(event.site)
            self.sizes[key] = len(records)

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            tally = self.leaks.get(optimizer.key)
            if tally is None:
                continue
            usual = self.windows[optimizer.key].usual
            yield self.report(
                f"{tally.count} updates at the start of an epoch were made of"
                f" {self.sizes[optimizer.key]} instead of {usual} micro-batches: the rest of the"
                " epoch before was still in the gradients.",
                tally.site,
                leaks=tally.count,
                usual_window=usual,
                window=self.sizes[optimizer.key],
            )
