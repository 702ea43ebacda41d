"""SF707: a distributed sampler gives the same order in every epoch."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

from torch.utils.data import DistributedSampler

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule


class _Passes:
    """Passes over one loader."""

    def __init__(self) -> None:
        self.epoch = self.trained_epoch = -1
        """Epoch number of the latest pass, and of the latest that was trained on."""
        self.steps = 0
        """Updates before the latest pass."""
        self.repeats = 0
        self.site = self.repeat_site = NOWHERE

    def end(self, steps: int) -> None:
        """The latest pass is over; one without updates is a look at the data."""
        if steps > self.steps:
            if self.epoch == self.trained_epoch:
                self.repeats += 1
                self.repeat_site = self.site
            self.trained_epoch = self.epoch


class DataSetEpoch(Rule, page=__file__):
    """Two passes that were trained on have the same epoch number of a DistributedSampler."""

    def setup(self) -> None:
        self.passes: dict[int, _Passes] = defaultdict(_Passes)

    def on_loader_started(self, event: ev.LoaderStarted) -> None:
        sampler: Any = event.owner.sampler
        inner = getattr(event.owner.batch_sampler, "sampler", None)
        if not isinstance(sampler, DistributedSampler) and isinstance(inner, DistributedSampler):
            sampler = inner
        if isinstance(sampler, DistributedSampler) and sampler.shuffle:
            passes, steps = self.passes[event.loader.key], event.loader.steps
            passes.end(steps)
            passes.epoch, passes.steps, passes.site = sampler.epoch, steps, event.site

    def findings(self) -> Findings:
        for loader in self.trace.loaders:
            passes = copy.copy(self.passes.get(loader.key))
            if passes is None:
                continue
            passes.end(loader.steps)
            epochs, number = passes.repeats + 1, passes.trained_epoch
            if epochs > 1:
                message = (
                    f"{epochs} epochs of this loader used the same epoch number ({number}) of its"
                    " DistributedSampler: the same order each time."
                )
                site = passes.repeat_site
                yield self.report(message, site, epochs=epochs, sampler_epoch=number)
