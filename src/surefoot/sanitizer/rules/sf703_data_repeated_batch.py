"""SF703: the same batch is used again and again."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.rules import fingerprints
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.trace import Trace

LEAST = 10
SHARE = 0.5


class DataRepeatedBatch(Rule):
    """Fingerprints of consecutive training batches are identical."""

    info = RuleInfo(
        code="SF703",
        slug="data-repeated-batch",
        certainty=Certainty.STRONG,
        title="Every update sees the same batch, although the loader has others.",
        observes="The inputs of the training forwards of consecutive updates are identical while"
        " the DataLoader in use has more than one batch. Quiet for full-batch training.",
        why="The model learns one batch by heart; the rest of the data is never seen.",
        example="x, y = next(iter(loader))\nfor step in range(1000): train_step(x, y)",
        fix="Fetch a batch inside the loop: for x, y in loader.",
        source="Follows from what next(iter(loader)) does.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.now: list[int] = []
        self.before: tuple[int, ...] = ()
        self.run = self.longest = 0
        self.site: Site = NOWHERE
        self.loader_batches: int | None = None

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        if not event.grad_enabled or len(self.now) > 64:
            return
        tensor = fingerprints.first_tensor((*event.arguments, *event.keywords.values()))
        digest = None if tensor is None else fingerprints.of_batch(tensor, self.trace.deep)
        if digest is not None:
            self.now.append(digest)
            if not self.run:
                self.site = event.site

    def on_step_end(self, event: ev.StepEnd) -> None:
        now, self.now = tuple(self.now), []
        loader = self.trace.data.loader
        if event.optimizer.kind == "LBFGS" or loader is None or not now:
            self.before, self.run = (), 0
            return
        self.run = self.run + 1 if now == self.before else 0
        self.before = now
        if self.run > self.longest and (loader.num_batches or 2) > 1:
            self.longest = self.run
            self.loader_batches = loader.num_batches

    def findings(self) -> Iterable[Finding]:
        if self.longest >= LEAST and self.longest >= SHARE * self.trace.updates:
            batches = "more" if self.loader_batches is None else self.loader_batches
            yield self.report(
                f"{share(self.longest + 1, self.trace.updates)} updates in a row saw the same"
                f" batch; the DataLoader has {batches} batches.",
                self.site,
                evidence={
                    "updates": self.trace.updates,
                    "same_batch": self.longest + 1,
                    "batches_of_loader": self.loader_batches,
                },
            )
