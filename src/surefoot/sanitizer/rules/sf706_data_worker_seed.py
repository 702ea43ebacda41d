"""SF706: workers draw the same random numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace

MOST_REPORTS = 2000


class DataWorkerSeed(Rule):
    """Equal states of a random stream that is used, in two workers."""

    info = RuleInfo(
        code="SF706",
        slug="data-worker-seed",
        certainty=Certainty.STRONG,
        title="Data workers draw the same random numbers.",
        observes="States of the random streams (Python's, NumPy's, torch's and generators that the"
        " dataset holds) before the first fetches of each worker: a stream that is drawn from and"
        " has the same state in two workers, or in every epoch. Quiet where nothing is drawn.",
        why="Augmentation and noise are copies of each other: far less variety than it seems.",
        example="class Noisy(Dataset):\n"
        "    def __init__(self): self.rng = np.random.default_rng(0)",
        fix="Make the generator in the worker (worker_init_fn, or lazily from"
        " torch.initial_seed()), or use torch's own stream.",
        source="https://pytorch.org/docs/stable/notes/faq.html (dataloader workers random seed)",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.seen: dict[tuple[object, str, str], set[tuple[int, int]]] = defaultdict(set)
        self.reports = 0
        self.site: Site = NOWHERE

    def on_loader_started(self, event: ev.LoaderStarted) -> None:
        if event.owner.num_workers > 0:
            self.site = event.site

    def on_worker_report(self, event: ev.WorkerReport) -> None:
        self.reports += 1
        if self.reports > MOST_REPORTS:
            return
        facts = event.facts
        for stream in facts["used"]:
            state = facts["before"].get(stream)
            self.seen[facts["dataset"], stream, state].add((facts["pid"], event.worker))

    def findings(self) -> Iterable[Finding]:
        shared: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for (_, stream, _), workers in self.seen.items():
            if len({pid for pid, _ in workers}) > 1:
                shared[stream] |= workers
        for stream, workers in shared.items():
            several = len({worker for _, worker in workers}) > 1
            who = "several workers" if several else "the workers of every epoch"
            yield self.report(
                f"{stream} had the same state in {who} ({len(workers)} worker processes) when it"
                " was drawn from.",
                self.site,
                evidence={"stream": stream, "processes": len(workers)},
            )
