"""SF704: every worker gives the whole stream."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from torch.utils.data import IterableDataset

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules import fingerprints
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace

MOST_SAMPLES = 20_000
LEAST_SAMPLES = 8
SHARE = 0.8


class DataWorkerDuplicates(Rule):
    """IterableDataset with workers and duplicate samples in one pass."""

    info = RuleInfo(
        code="SF704",
        slug="data-worker-duplicates",
        certainty=Certainty.PROOF,
        title="Each worker of an IterableDataset yields the same samples.",
        observes="Samples of one pass over a DataLoader with several workers and an"
        " IterableDataset: nearly all occur as often as there are workers. Quiet for sampling"
        " with replacement, which gives uneven counts.",
        why="An epoch holds every sample several times, next to each other, and is as many times"
        " as long.",
        example="class Stream(IterableDataset):\n    def __iter__(self): yield from rows",
        fix="Split the stream by torch.utils.data.get_worker_info() in __iter__.",
        source="torch.utils.data.IterableDataset, example 1",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.workers: dict[int, int] = {}
        self.samples: dict[int, Counter[int]] = defaultdict(Counter)
        self.sites: dict[int, Site] = {}
        self.found: dict[int, tuple[int, int]] = {}

    def on_loader_started(self, event: ev.LoaderStarted) -> None:
        loader = event.owner
        if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1:
            self.workers[event.loader.key] = loader.num_workers
            self.sites[event.loader.key] = event.site
            self._judge(event.loader.key)
            self.samples[event.loader.key].clear()

    def on_batch_fetched(self, event: ev.BatchFetched) -> None:
        key = event.loader.key
        if key not in self.workers or self.samples[key].total() >= MOST_SAMPLES:
            return
        tensor = next(graph.tensors_in(event.batch), None)
        if tensor is None or tensor.dim() == 0:
            return
        digests = fingerprints.of_rows(tensor)
        if not digests and tensor.dim() == 1 and tensor.device.type == "cpu":
            digests = [hash(value) for value in tensor.tolist()]
        self.samples[key].update(digests)

    def on_run_ended(self, event: ev.RunEnded) -> None:
        for key in self.workers:
            self._judge(key)

    def _judge(self, key: int) -> None:
        counts, workers = self.samples[key], self.workers[key]
        if len(counts) < LEAST_SAMPLES:
            return
        often = sum(1 for count in counts.values() if count % workers == 0)
        if often >= SHARE * len(counts):
            self.found[key] = counts.total(), len(counts)

    def findings(self) -> Iterable[Finding]:
        for key, (total, distinct) in self.found.items():
            yield self.report(
                f"One pass gave {total} samples, {distinct} of them distinct: each of the"
                f" {self.workers[key]} workers yields all of them.",
                self.sites[key],
                evidence={
                    "samples": total,
                    "distinct": distinct,
                    "workers": self.workers[key],
                },
            )
