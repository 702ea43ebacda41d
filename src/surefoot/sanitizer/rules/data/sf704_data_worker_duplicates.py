"""SF704: every worker gives the whole stream."""

from __future__ import annotations

from collections import Counter, defaultdict

from torch.utils.data import IterableDataset

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers import fingerprints
from surefoot.sanitizer.rules.base import Findings, Rule, Site

MOST_SAMPLES = 20_000
LEAST_SAMPLES = 8
SHARE = 0.8


class DataWorkerDuplicates(Rule, page=__file__):
    """IterableDataset with workers and duplicate samples in one pass."""

    def setup(self) -> None:
        self.workers: dict[int, int] = {}
        self.samples: dict[int, list[Counter[int]]] = {}
        """For each loader the samples of this pass, by the worker that gave them."""
        self.fetched: dict[int, int] = defaultdict(int)
        self.sites: dict[int, Site] = {}
        self.found: dict[int, tuple[int, int]] = {}

    def on_loader_started(self, event: ev.LoaderStarted) -> None:
        loader = event.owner
        if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1:
            key = event.loader.key
            self.workers[key] = loader.num_workers
            self.sites[key] = event.site
            self._judge(key)
            self.samples[key] = [Counter() for _ in range(loader.num_workers)]
            self.fetched[key] = 0

    def on_batch_fetched(self, event: ev.BatchFetched) -> None:
        key = event.loader.key
        if key not in self.workers:
            return
        # A loader asks its workers in turn, and gives their batches in that order.
        counts = self.samples[key][self.fetched[key] % self.workers[key]]
        self.fetched[key] += 1
        if counts.total() >= MOST_SAMPLES // self.workers[key]:
            return
        tensor = next(graph.tensors_in(event.batch), None)
        if tensor is None or tensor.dim() == 0:
            return
        digests = fingerprints.of_rows(tensor)
        if not digests and tensor.dim() == 1 and tensor.device.type == "cpu":
            digests = [hash(value) for value in tensor.tolist()]
        counts.update(digests)

    def on_run_ended(self, event: ev.RunEnded) -> None:
        for key in self.workers:
            self._judge(key)

    def _judge(self, key: int) -> None:
        parts = self.samples.get(key, [])
        distinct = set().union(*parts)
        if len(distinct) < LEAST_SAMPLES:
            return
        equal = sum(1 for sample in distinct if len({part[sample] for part in parts}) == 1)
        if equal >= SHARE * len(distinct):
            self.found[key] = sum(part.total() for part in parts), len(distinct)

    def findings(self) -> Findings:
        for key, (total, distinct) in self.found.items():
            message = (
                f"One pass gave {total} samples, {distinct} of them distinct: each of the"
                f" {self.workers[key]} workers yields all of them."
            )
            yield self.report(
                message,
                self.sites[key],
                samples=total,
                distinct=distinct,
                workers=self.workers[key],
            )
