"""SF707: a distributed sampler gives the same order in every epoch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.utils.data import DistributedSampler

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, Site


class DataSetEpoch(Rule, page=__file__):
    """DistributedSampler with shuffle iterated again at an unchanged epoch."""

    def setup(self) -> None:
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

    def findings(self) -> Findings:
        for key, count in self.repeats.items():
            message = (
                f"{count + 1} epochs of this loader used the same epoch number"
                f" ({self.last[key][0]}) of its DistributedSampler: the same order each time."
            )
            yield self.report(
                message, self.sites[key], epochs=count + 1, sampler_epoch=self.last[key][0]
            )
