"""SF702: the host waits for the device in every step."""

from __future__ import annotations

from collections import Counter

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, Site, share

LEAST_UPDATES = 20
SHARE = 0.9


class SyncEveryStep(Rule, page=__file__):
    """`.item()` and the like on device tensors, from the user's lines, in nearly every step."""

    def setup(self) -> None:
        self.calls: Counter[tuple[Site, str]] = Counter()
        self.last: dict[tuple[Site, str], int] = {}

    def on_synchronised(self, event: ev.Synchronised) -> None:
        key = event.site, event.how
        is_new = self.trace.training_began and self.last.get(key) != self.trace.updates
        if is_new and (len(self.calls) < 1000 or key in self.calls):
            self.calls[key] += 1
            self.last[key] = self.trace.updates

    def findings(self) -> Findings:
        updates = self.trace.updates
        for (site, how), count in self.calls.items():
            if updates >= LEAST_UPDATES and count >= SHARE * (updates - 1):
                yield self.report(
                    f"{how} made the host wait for the device in {share(count, updates)} updates.",
                    site,
                    updates=updates,
                    waits=count,
                )
