"""SF710: validation samples are trained on."""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site, user_stack
from surefoot.sanitizer.rules import fingerprints
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace

MOST_SAMPLES = 50_000
MOST_ROWS_PER_BATCH = 4096
LEAST_VALIDATION = 20
LEAST_COMMON = 5
LOW, HIGH = 0.02, 0.98
LEAST_DISTINCT = 0.95
PART = 0.8
"""A set that is called validation and lies in the training set is smaller than that."""
MOST_EVALUATIONS = 64
VALIDATION_WORDS = {"val", "valid", "validation", "validate", "test", "testing", "heldout", "held"}
TRAINING_WORDS = {"train", "training", "trained"}
Key = tuple[int, int, tuple[tuple[str, int], ...]]
"""Which model was evaluated, after which loader, from which lines."""


class ValOverlapsTrain(Rule):
    """Sample fingerprints seen both before S and in no-grad evaluation."""

    info = RuleInfo(
        code="SF710",
        slug="val-overlaps-train",
        certainty=Certainty.STRONG,
        title="Samples of the validation set are in the training set.",
        observes="Digests of the samples in training forwards and in evaluation forwards of the"
        " same model: part of what one line evaluates was trained on; or all of it, where that line"
        " or one that calls it speaks of validation or test data. Quiet for a report of the"
        " training accuracy, for teachers, for samples drawn with replacement, and for data with"
        " many equal samples.",
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
        """Only digests with these bits clear are kept: a fair sample of samples, in all sets."""
        self.unseen_rows = False
        self.train: set[int] = set()
        self.evaluations: dict[Key, _Evaluation] = {}
        self.pending: list[int] = []
        """Samples of training forwards that no step has followed yet."""
        self.looking: list[tuple[_Evaluation, list[int]]] = []
        """Samples of evaluation forwards since the latest step."""
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
        if len(set(digests)) < LEAST_DISTINCT * len(digests) and not fingerprints.is_fine(tensor):
            # Equal samples need not be one sample; fine-grained ones were drawn with replacement.
            self.low_entropy += 1
            return
        if not evaluates:
            # Trained on only once a step follows.
            self.pending += digests
            return
        evaluation = self._evaluation_of(event)
        if evaluation is not None and sum(len(d) for _, d in self.looking) <= MOST_SAMPLES:
            self.looking.append((evaluation, digests))

    def _evaluation_of(self, event: ev.ForwardBegin) -> _Evaluation | None:
        stack = user_stack(2)
        loader = self.trace.data.loader
        key = (
            self.trace.module_key(event.module),
            0 if loader is None else loader.key,
            tuple((site.file, site.line) for site in stack),
        )
        if key not in self.evaluations and len(self.evaluations) < MOST_EVALUATIONS:
            self.evaluations[key] = _Evaluation(event.site, _claims_validation(stack))
        return self.evaluations.get(key)

    def on_step_end(self, event: ev.StepEnd) -> None:
        self._settle()
        self._keep(self.train, self.pending)
        self.pending = []

    def _settle(self) -> None:
        # What is evaluated for the very update that trains on it gives targets (a teacher does).
        now = set(self.pending)
        passes: dict[_Evaluation, list[int]] = defaultdict(list)
        for evaluation, digests in self.looking:
            passes[evaluation] += digests
        for evaluation, seen in passes.items():
            # A sample that comes twice was drawn: from a pool, which may be the training data's.
            evaluation.draws |= len(set(seen)) < LEAST_DISTINCT * len(seen)
            self._keep(evaluation.samples, [digest for digest in seen if digest not in now])
        self.looking = []

    def _keep(self, digests: set[int], new: list[int]) -> None:
        digests.update(digest for digest in new if not digest & self.mask)
        while len(digests) > MOST_SAMPLES:
            self.mask = 2 * self.mask + 1
            for kept in (self.train, *(e.samples for e in self.evaluations.values())):
                kept.difference_update([digest for digest in kept if digest & self.mask])

    def findings(self) -> Iterable[Finding]:
        self._settle()
        if self.unseen_rows or self.low_entropy > 0.2 * self.batches:
            return
        told = set()
        for evaluation in self.evaluations.values():
            evaluated = len(evaluation.samples)
            common = len(evaluation.samples & self.train)
            if evaluated < LEAST_VALIDATION or common < LEAST_COMMON or evaluation.site in told:
                continue
            if evaluation.draws:
                continue
            part = common / evaluated
            is_claimed = evaluation.claimed and evaluated <= PART * len(self.train)
            if LOW < part < HIGH or (part >= HIGH and is_claimed):
                told.add(evaluation.site)
                called = f" of what line {evaluation.claim} calls validation or test" * is_claimed
                yield self.report(
                    f"{common} of {evaluated} evaluated samples ({part:.0%}){called} were trained"
                    " on.",
                    evaluation.site,
                    evidence={
                        "evaluated": evaluated,
                        "trained": len(self.train),
                        "common": common,
                    },
                )


class _Evaluation:
    """The samples that one chain of calls evaluated."""

    def __init__(self, site: Site, claim: int) -> None:
        self.site = site
        self.claim = claim
        """The line that calls them validation or test samples; 0 for none."""
        self.samples: set[int] = set()
        self.draws = False
        """Whether it draws samples, with replacement, rather than going through a set."""

    @property
    def claimed(self) -> bool:
        return self.claim > 0


def _claims_validation(stack: Iterable[Site]) -> int:
    """The innermost line that speaks of validation or test data, unless of training data too."""
    for site in stack:
        words = set(re.findall("[a-z]+", linecache.getline(site.file, site.line).lower()))
        if words & TRAINING_WORDS:
            return 0
        if words & VALIDATION_WORDS:
            return site.line
    return 0
