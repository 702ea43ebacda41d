"""SF204: the short window of an epoch leaks into the next one."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import WindowTally
from surefoot.sanitizer.rules.base import Findings, Rule, UpdateTally


class AccumTailLeak(Rule, page=__file__):
    """A window spans an epoch boundary and has more backward passes than the others."""

    def setup(self) -> None:
        self.windows: dict[int, WindowTally] = defaultdict(WindowTally)
        self.leaks = UpdateTally(self.trace)

    def on_step_end(self, event: ev.StepEnd) -> None:
        records, windows = event.update.backwards, self.windows[event.optimizer.key]
        if not windows.add(event.update):
            return
        loaders = {record.loader for record in records}
        epochs = {record.epoch for record in records}
        spans = len(loaders) == 1 and 0 not in loaders and len(epochs) > 1
        if spans and len(records) > windows.usual > 0:
            self.leaks.add(event.optimizer, event.site, len(records))

    def findings(self) -> Findings:
        for optimizer, tally in self.leaks.often(1):
            usual = self.windows[optimizer.key].usual
            message = (
                f"{tally.count} updates at the start of an epoch were made of {tally.latest}"
                f" instead of {usual} micro-batches: the rest of the epoch before was still in the"
                " gradients."
            )
            yield self.report(
                message, tally.site, leaks=tally.count, usual_window=usual, window=tally.latest
            )
