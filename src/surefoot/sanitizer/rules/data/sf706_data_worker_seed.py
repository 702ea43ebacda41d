"""SF706: workers draw the same random numbers."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule, Site

MOST_REPORTS = 2000


class DataWorkerSeed(Rule, page=__file__):
    """Equal states of a random stream that is used, in two workers."""

    def setup(self) -> None:
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

    def findings(self) -> Findings:
        shared: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for (_, stream, _), workers in self.seen.items():
            if len({pid for pid, _ in workers}) > 1:
                shared[stream] |= workers
        for stream, workers in shared.items():
            several = len({worker for _, worker in workers}) > 1
            who = "several workers" if several else "the workers of every epoch"
            message = (
                f"{stream} had the same state in {who} ({len(workers)} worker processes) when it"
                " was drawn from."
            )
            yield self.report(message, self.site, stream=stream, processes=len(workers))
