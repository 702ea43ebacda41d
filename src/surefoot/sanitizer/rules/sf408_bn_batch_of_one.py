"""SF408: BatchNorm normalises a single sample by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.trace import Trace

ON_PURPOSE = 0.5
FEW = 16


class BnBatchOfOne(Rule):
    """BatchNorm in train mode with N = 1."""

    info = RuleInfo(
        code="SF408",
        slug="bn-batch-of-one",
        certainty=Certainty.PROOF,
        title="BatchNorm in train mode got a batch of one sample.",
        observes="Training forwards of BatchNorm with a batch of 1. A hint where most batches are"
        " of one sample of many positions: then it is meant (segmentation of large images).",
        why="The sample is normalised by its own statistics, so its mean is lost, and the running"
        " variance takes a jump.",
        example="DataLoader(data_of_257_samples, batch_size=32)  # the last batch is of one",
        fix="Pass drop_last=True to the training loader, or choose a batch size that leaves more.",
        source="Ioffe, Szegedy 2015, https://arxiv.org/abs/1502.03167",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
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

    def findings(self) -> Iterable[Finding]:
        for site, count in self.of_one.items():
            if not count or not self.trace.updates:
                continue
            meant = count > ON_PURPOSE * self.calls[site] and not self.of_few[site]
            yield self.report(
                f"{share(count, self.calls[site])} BatchNorm forwards in training saw a single"
                " sample.",
                site,
                certainty=Certainty.HEURISTIC if meant else Certainty.PROOF,
                evidence={"forwards": self.calls[site], "of_one": count},
            )
