"""SF703: the same batch is used again and again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers import fingerprints
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule, Site, share
from surefoot.sanitizer.rules.data.batch_words import batch_sizes

LEAST = 10
SHARE = 0.5
MOST_TENSORS = 4


class DataRepeatedBatch(Rule, page=__file__):
    """Fingerprints of consecutive training batches are identical."""

    def setup(self) -> None:
        self.now: list[int] = []
        self.before: tuple[int, ...] = ()
        self.run = self.longest = 0
        self.site: Site = NOWHERE
        self.loader_batches: int | None = None
        self.from_loader = False
        self.rows = 0
        """Samples of the batch, where it came from no loader."""

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        if not event.grad_enabled or len(self.now) > 64:
            return
        tensor = fingerprints.first_tensor(event.inputs)
        if tensor is None:
            return
        if self.trace.data.loader is None:
            self._add(event.inputs)
            self.rows = self.rows if self.run else self._rows_of(tensor)
        else:
            self._add([tensor])
        if self.now and not self.run:
            self.site = event.site

    def on_loss_called(self, event: ev.LossCalled) -> None:
        # One graph or grid may be given each time, and other parts of it be compared.
        if self.trace.data.loader is None and event.grad_enabled and len(self.now) <= 64:
            self._add([event.target])

    def _add(self, values: Iterable[object]) -> None:
        for tensor in itertools.islice(graph.tensors_in(list(values)), MOST_TENSORS):
            if tensor.dim() >= 1 and tensor.numel() > 1:
                digest = fingerprints.of_batch(tensor, self.trace.deep)
                if digest is not None:
                    self.now.append(digest)

    def _rows_of(self, tensor: torch.Tensor) -> int:
        """Number of samples; 0 where they are all the same."""
        digests = set(fingerprints.of_rows(tensor, self.trace.deep))
        return len(tensor) if len(digests) > 1 else 0

    def on_step_end(self, event: ev.StepEnd) -> None:
        now, self.now = tuple(self.now), []
        loader = self.trace.data.loader
        if event.optimizer.kind == "LBFGS" or not now:
            self.before, self.run = (), 0
            return
        self.run = self.run + 1 if now == self.before else 0
        self.before = now
        if loader is None:
            # Without a loader, only what the script says tells a batch from all of the data.
            if not self.run or not self.rows:
                return
            sizes = batch_sizes(self.site.file)
            if sizes is None or self.rows not in sizes:
                return
        if self.run > self.longest and (loader is None or (loader.num_batches or 2) > 1):
            self.longest = self.run
            self.loader_batches = None if loader is None else loader.num_batches
            self.from_loader = loader is not None

    def findings(self) -> Findings:
        if self.longest >= LEAST and self.longest >= SHARE * self.trace.updates:
            batches = "more" if self.loader_batches is None else self.loader_batches
            others = f"; the DataLoader has {batches} batches" if self.from_loader else ""
            message = (
                f"{share(self.longest + 1, self.trace.updates)} updates in a row saw the same"
                f" batch{others}."
            )
            yield self.report(
                message,
                self.site,
                updates=self.trace.updates,
                same_batch=self.longest + 1,
                batches_of_loader=self.loader_batches,
            )
