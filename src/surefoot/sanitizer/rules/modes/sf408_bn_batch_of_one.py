"""SF408: BatchNorm normalises a single sample by itself."""

from __future__ import annotations

from collections import Counter

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Certainty, Findings, Rule, Site, share

ON_PURPOSE = 0.5
FEW = 16


class BnBatchOfOne(Rule, page=__file__):
    """BatchNorm in train mode with N = 1."""

    def setup(self) -> None:
        self.calls: Counter[Site] = Counter()
        self.of_one: Counter[Site] = Counter()
        self.of_few: Counter[Site] = Counter()
        """Those of them with too few positions to stand for more samples."""

    def on_batch_norm_called(self, event: ev.BatchNormCalled) -> None:
        trains = event.grad_enabled and event.module.track_running_stats
        if trains and len(self.calls) < 1000:
            self.calls[event.site] += 1
            self.of_one[event.site] += event.batch == 1
            self.of_few[event.site] += event.batch == 1 and event.values_per_channel <= FEW

    def on_batch_norm_repeated(self, event: ev.BatchNormRepeated) -> None:
        self.calls[event.site] += event.calls

    def findings(self) -> Findings:
        for site, count in self.of_one.items():
            if not count or not self.trace.updates:
                continue
            meant = count > ON_PURPOSE * self.calls[site] and not self.of_few[site]
            message = (
                f"{share(count, self.calls[site])} BatchNorm forwards in training saw a single"
                " sample."
            )
            yield self.report(
                message,
                site,
                certainty=Certainty.HEURISTIC if meant else Certainty.PROOF,
                forwards=self.calls[site],
                of_one=count,
            )
