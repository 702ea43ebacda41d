"""SF710: validation samples are trained on."""

from __future__ import annotations

import linecache
import re
from collections import defaultdict
from collections.abc import Iterable

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import user_stack
from surefoot.sanitizer.matchers import fingerprints
from surefoot.sanitizer.rules.base import Findings, Rule, Site
from surefoot.sanitizer.rules.data.lives import Lives

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
MOST_PENDING = 1_000
Key = tuple[int, int, tuple[tuple[str, int], ...]]
"""Which life of a model was evaluated, after which loader, from which lines."""


class ValOverlapsTrain(Rule, page=__file__):
    """Samples that updates were trained on come again in forwards without gradients."""

    def setup(self) -> None:
        self.mask = 0
        """Only digests with these bits clear are kept: a fair sample of samples, in all sets."""
        self.unseen_rows = False
        self.trained: dict[int, set[int]] = defaultdict(set)
        """By life of a model: what it was trained on."""
        self.lives = self.use(Lives)
        self.evaluations: dict[Key, _Evaluation] = {}
        self.pending: list[tuple[int, list[int]]] = []
        """Samples of training forwards that no step has followed yet."""
        self.looking: list[tuple[_Evaluation, list[int]]] = []
        """Samples of evaluation forwards since the latest step."""
        self.low_entropy = 0
        self.batches = 0

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        evaluates = not event.grad_enabled and not event.training
        trains = event.grad_enabled and event.training
        if not (evaluates or trains) or self.unseen_rows or len(self.pending) > MOST_PENDING:
            return
        if evaluates and not (self.trace.training_began and self.trace.is_trained(event.module)):
            return
        tensor = fingerprints.first_tensor(event.inputs)
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
            self.pending.append((self.trace.module_key(event.module), digests))
            self.lives.know(event.module)
            return
        evaluation = self._evaluation_of(event)
        if evaluation is not None and sum(len(d) for _, d in self.looking) <= MOST_SAMPLES:
            self.looking.append((evaluation, digests))

    def _evaluation_of(self, event: ev.ForwardBegin) -> _Evaluation | None:
        stack = user_stack(2)
        loader = self.trace.data.loader
        life = self.lives.of(self.trace.module_key(event.module))
        key = (
            life,
            0 if loader is None else loader.key,
            tuple((site.file, site.line) for site in stack),
        )
        if key not in self.evaluations and len(self.evaluations) < MOST_EVALUATIONS:
            members = self.lives.know(event.module)
            claim = _claims_validation(stack)
            lives = self.lives.sharing(members)
            self.evaluations[key] = _Evaluation(event.site, claim, lives, key[1])
        return self.evaluations.get(key)

    def on_state_restored(self, event: ev.StateRestored) -> None:
        if event.kind == "module":
            self.lives.restored(event.owner)

    def on_step_begin(self, event: ev.StepBegin) -> None:
        self.lives.before_step(event.optimizer)

    def on_step_end(self, event: ev.StepEnd) -> None:
        self._settle()
        for key, digests in self.pending:
            self._keep(self.trained[self.lives.of(key)], digests)
        self.pending = []
        self.lives.after_step(event.optimizer)

    def _settle(self) -> None:
        # What is evaluated for the very update that trains on it gives targets (a teacher does).
        now = {digest for _, digests in self.pending for digest in digests}
        passes: dict[_Evaluation, list[int]] = defaultdict(list)
        for evaluation, digests in self.looking:
            passes[evaluation] += digests
        for evaluation, seen in passes.items():
            evaluation.passed(seen)
            kept = [digest for digest in seen if digest not in now]
            self._keep(evaluation.samples, kept)
            # What is trained on only after it was evaluated (queried, labelled) spoils nothing.
            trained = [self.trained[life] for life in evaluation.lives if life in self.trained]
            common = [digest for digest in kept if any(digest in known for known in trained)]
            self._keep(evaluation.common, common)
        self.looking = []

    def _keep(self, digests: set[int], new: list[int]) -> None:
        digests.update(digest for digest in new if not digest & self.mask)
        while len(digests) > MOST_SAMPLES:
            self.mask = 2 * self.mask + 1
            sets = [s for e in self.evaluations.values() for s in (e.samples, e.common)]
            for kept in (*self.trained.values(), *sets):
                kept.difference_update([digest for digest in kept if digest & self.mask])

    def _gives_targets(self, evaluation: _Evaluation) -> bool:
        """Whether another model, which these lines never evaluate, is trained on all of it."""
        if evaluation.claimed:
            return False
        here = [e for e in self.evaluations.values() if e.site == evaluation.site]
        lives = {life for e in here for life in e.lives}
        others = set().union(*(s for life, s in self.trained.items() if life not in lives))
        return len(evaluation.samples & others) >= LEAST_DISTINCT * len(evaluation.samples)

    def findings(self) -> Findings:
        self._settle()
        if self.unseen_rows or self.low_entropy > 0.2 * self.batches:
            return
        told = set()
        idle = {loader.key for loader in self.trace.loaders if not loader.steps}
        for evaluation in self.evaluations.values():
            evaluated = len(evaluation.samples)
            # What the evaluated weights were trained on, also as part of another model.
            train = set().union(*(self.trained.get(life, ()) for life in evaluation.lives))
            common = len(evaluation.common)
            if evaluated < LEAST_VALIDATION or common < LEAST_COMMON or evaluation.site in told:
                continue
            if evaluation.draws or self._gives_targets(evaluation):
                continue
            part = common / evaluated
            # What is evaluated before it is trained on, as the rest of it is, is training data.
            is_inside = len(evaluation.samples & train) >= HIGH * evaluated
            is_claimed = evaluation.claimed and (
                evaluated <= PART * len(train) or evaluation.loader in idle
            )
            if part > LOW and (is_claimed or not is_inside):
                told.add(evaluation.site)
                called = f" of what line {evaluation.claim} calls validation or test" * is_claimed
                message = (
                    f"{common} of {evaluated} evaluated samples ({part:.0%}){called} were trained"
                    " on."
                )
                yield self.report(
                    message, evaluation.site, evaluated=evaluated, trained=len(train), common=common
                )


class _Evaluation:
    """The samples that one chain of calls evaluated."""

    def __init__(self, site: Site, claim: int, lives: list[int], loader: int) -> None:
        self.site = site
        self.lives = lives
        """Lives of models that the evaluated weights lived."""
        self.claim = claim
        """The line that calls them validation or test samples; 0 for none."""
        self.samples: set[int] = set()
        self.common: set[int] = set()
        """Those that had been trained on when they were evaluated."""
        self.loader = loader
        """Key of the loader that gave them; 0 for none."""
        self.first: frozenset[int] = frozenset()
        """Samples of its first pass."""
        self.passes = 0
        self.repeats = self.renews = False

    def passed(self, seen: list[int]) -> None:
        """Takes in the samples that were evaluated between two updates."""
        distinct = frozenset(seen)
        self.repeats |= len(distinct) < LEAST_DISTINCT * len(seen)
        self.first = self.first or distinct
        self.renews |= len(distinct - self.first) > (1 - LEAST_DISTINCT) * len(distinct)
        self.passes += 1

    @property
    def draws(self) -> bool:
        """Whether it draws samples, with replacement, rather than going through a set.

        Then samples come twice, and others in each pass: from a pool, which may be the training
        data's. A set that holds samples twice is the same in each pass.
        """
        return self.repeats and (self.renews or (self.passes == 1 and not self.loader))

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
