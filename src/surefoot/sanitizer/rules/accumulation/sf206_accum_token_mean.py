"""SF206: means over unequal token counts are averaged."""

from __future__ import annotations

from collections import Counter, defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import is_homogeneous
from surefoot.sanitizer.rules.base import Certainty, Findings, Rule, Site, Tally
from surefoot.sanitizer.state import BackwardRecord

LEAST = 2
SHARE = 0.3
"""Of the windows."""
LOOKS = 64
SPREAD = 0.05
"""Counts of a window that differ by less than this share of their mean are as good as equal."""


class AccumTokenMean(Rule, page=__file__):
    """The number of targets that count varies in a window while the factor stays constant."""

    def setup(self) -> None:
        self.are_tokens = False
        self.looks: Counter[Site] = Counter()
        self.windows: Counter[int] = Counter()
        self.uneven: dict[tuple[int, Certainty], Tally] = defaultdict(Tally)
        self.example: dict[tuple[int, Certainty], tuple[list[float], Site]] = {}

    def on_embedding_called(self, event: ev.EmbeddingCalled) -> None:
        self.are_tokens = True

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if self.are_tokens or not event.grad_enabled or event.target.is_floating_point():
            return
        self.looks[event.site] += 1
        if event.target.device.type == "cpu" and self.looks[event.site] <= LOOKS:
            ignored = event.options.get("ignore_index", -100)
            self.are_tokens = bool((event.target == ignored).any())

    def on_step_end(self, event: ev.StepEnd) -> None:
        records = event.update.backwards
        if len(records) < 2 or event.update.wipes or not is_homogeneous(records):
            return
        key = event.optimizer.key
        self.windows[key] += 1
        for certainty, counts in (
            (Certainty.STRONG, _ignored_counts(records)),
            (Certainty.HEURISTIC, _divisors(records)),
        ):
            if counts and max(counts) - min(counts) > SPREAD * sum(counts) / len(counts):
                self.uneven[key, certainty].add(records[0].site)
                self.example[key, certainty] = counts, records[0].site
                break

    def findings(self) -> Findings:
        for (key, certainty), tally in self.uneven.items():
            windows = self.windows[key]
            if tally.count < max(min(LEAST, windows), SHARE * windows):
                continue
            counts, site = self.example[key, certainty]
            if not self.are_tokens:
                # What is drawn as one sample (a graph, a set) may count as one.
                certainty = Certainty.HEURISTIC
            listed = ", ".join(f"{count:g}" for count in counts[:6])
            message = (
                f"In {tally.of(windows)} windows the micro-batches had"
                f" different numbers of targets (last: {listed}), and the mean of each counted"
                " the same."
            )
            yield self.report(
                message,
                site,
                certainty=certainty,
                windows=windows,
                uneven=tally.count,
                last=counts[:16],
            )


def _ignored_counts(records: tuple[BackwardRecord, ...]) -> list[float]:
    """Targets that count per micro-batch, where only the constant factor weighs them."""
    counts, factors = [], set()
    for record in records:
        terms = [term for term in record.terms if term.num_targets is not None]
        if len(terms) != 1 or terms[0].factor is None or terms[0].num_targets is None:
            return []
        counts.append(terms[0].num_targets)
        factors.add(round(terms[0].factor, 9))
    # Sums of class weights differ with the classes drawn: what such a mean is of is a choice.
    are_numbers = all(float(count).is_integer() for count in counts)
    return counts if len(factors) == 1 and are_numbers else []


def _divisors(records: tuple[BackwardRecord, ...]) -> list[float]:
    """The tensor that each micro-batch's sum was divided by, where it differs."""
    counts = []
    for record in records:
        terms = [t for t in record.terms if t.reduction == "sum" and t.divided_by]
        if len(terms) != 1:
            return []
        counts.append(terms[0].divided_by[-1])
    return counts
