"""SF710: validation samples are trained on."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.rules import fingerprints
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace

MOST_SAMPLES = 50_000
MOST_ROWS_PER_BATCH = 4096
LEAST_VALIDATION = 20
LEAST_COMMON = 5
LOW, HIGH = 0.02, 0.98
LEAST_DISTINCT = 0.95


class ValOverlapsTrain(Rule):
    """Sample fingerprints seen both before S and in no-grad evaluation."""

    info = RuleInfo(
        code="SF710",
        slug="val-overlaps-train",
        certainty=Certainty.STRONG,
        title="Samples of the validation set are in the training set.",
        observes="Digests of the samples in training forwards and in evaluation forwards of the"
        " same model: part of the evaluated samples were trained on. Quiet where all of them"
        " were (a report of the training accuracy) and for data with many equal samples.",
        why="The validation measures memory: overfitting stays unseen and the wrong model is"
        " chosen.",
        example="train, _ = random_split(data, [300, 100])\n"
        "_, val = random_split(data, [300, 100])",
        fix="Split once and use both parts of that one split.",
        source="Follows from what a validation set is for.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.mask = 0
        """Only digests with these bits clear are kept: a fair sample of samples, in both sets."""
        self.unseen_rows = False
        self.train: set[int] = set()
        self.validation: set[int] = set()
        self.site: Site = NOWHERE
        self.pending: list[int] = []
        self.low_entropy = 0
        self.batches = 0

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        evaluates = not event.grad_enabled and not event.training
        trains = event.grad_enabled and event.training
        if not (evaluates or trains) or self.unseen_rows or len(self.pending) > MOST_SAMPLES:
            return
        if evaluates and not (self.trace.training_began and self.trace.is_trained(event.module)):
            return
        tensor = fingerprints.first_tensor((*event.arguments, *event.keywords.values()))
        if tensor is None or tensor.dim() < 2 or tensor.shape[0] < 2:
            return
        if tensor.shape[0] > MOST_ROWS_PER_BATCH:
            # Which of its samples are looked at would decide what overlaps.
            self.unseen_rows = True
            return
        digests = fingerprints.of_rows(tensor, self.trace.deep)
        self.batches += bool(digests)
        if len(set(digests)) < LEAST_DISTINCT * len(digests):
            self.low_entropy += 1
            return
        if evaluates:
            self._keep(self.validation, digests)
            self.site = event.site
        else:
            # Trained on only once a step follows.
            self.pending += digests

    def on_step_end(self, event: ev.StepEnd) -> None:
        self._keep(self.train, self.pending)
        self.pending = []

    def _keep(self, digests: set[int], new: list[int]) -> None:
        digests.update(digest for digest in new if not digest & self.mask)
        while len(digests) > MOST_SAMPLES:
            self.mask = 2 * self.mask + 1
            for kept in (self.train, self.validation):
                kept.difference_update([digest for digest in kept if digest & self.mask])

    def findings(self) -> Iterable[Finding]:
        if self.unseen_rows or len(self.validation) < LEAST_VALIDATION:
            return
        if self.low_entropy > 0.2 * self.batches:
            return
        common = len(self.validation & self.train)
        part = common / len(self.validation)
        if common >= LEAST_COMMON and LOW < part < HIGH:
            yield self.report(
                f"{common} of {len(self.validation)} evaluated samples ({part:.0%}) were trained"
                " on.",
                self.site,
                evidence={
                    "evaluated": len(self.validation),
                    "trained": len(self.train),
                    "common": common,
                },
            )
