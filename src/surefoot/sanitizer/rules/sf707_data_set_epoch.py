"""SF707: a distributed sampler gives the same order in every epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DistributedSampler

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace


class DataSetEpoch(Rule):
    """DistributedSampler with shuffle iterated again at an unchanged epoch."""

    info = RuleInfo(
        code="SF707",
        slug="data-set-epoch",
        certainty=Certainty.STRONG,
        title="set_epoch() is not called, so every epoch has the same order.",
        observes="A shuffling DistributedSampler that is iterated again, after updates, with its"
        " epoch unchanged. Quiet for a single epoch and for samplers without shuffle.",
        why="The sampler seeds its permutation by seed + epoch: without set_epoch the batches are"
        " the same in every epoch.",
        example="for epoch in range(10):\n    for x, y in loader: ...",
        fix="Call loader.sampler.set_epoch(epoch) at the start of every epoch.",
        source="torch.utils.data.DistributedSampler",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.last: dict[int, tuple[int, int]] = {}
        self.repeats: dict[int, int] = defaultdict(int)
        self.sites: dict[int, Site] = {}

    def on_loader_started(self, event: ev.LoaderStarted) -> None:
        sampler: Any = event.owner.sampler
        inner = getattr(event.owner.batch_sampler, "sampler", None)
        if not isinstance(sampler, DistributedSampler) and isinstance(inner, DistributedSampler):
            sampler = inner
        if not isinstance(sampler, DistributedSampler) or not sampler.shuffle:
            return
        key, steps = event.loader.key, event.loader.steps
        before = self.last.get(key)
        if before is not None and before[0] == sampler.epoch and steps > before[1]:
            self.repeats[key] += 1
            self.sites[key] = event.site
        self.last[key] = sampler.epoch, steps

    def findings(self) -> Iterable[Finding]:
        for key, count in self.repeats.items():
            yield self.report(
                f"{count + 1} epochs of this loader used the same epoch number"
                f" ({self.last[key][0]}) of its DistributedSampler: the same order each time.",
                self.sites[key],
                evidence={"epochs": count + 1, "sampler_epoch": self.last[key][0]},
            )
