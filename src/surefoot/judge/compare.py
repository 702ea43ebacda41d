"""Compares runs metric by metric, using the spread over seeds; claims only what is significant.

Runs that differ only in the seed repeat one experiment. Two experiments differ if the 95 % Welch
interval of the difference of their means excludes 0, from at least three finished seeds each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from string import ascii_uppercase

from surefoot.core.stopping import usual_direction
from surefoot.judge.contract import verdict_on
from surefoot.judge.differences import DifferingFact, differing_facts
from surefoot.judge.repeats import is_repeat, same_identity
from surefoot.judge.statistics import MeanDifference, Spread, spread_of, welch
from surefoot.judge.verdict import ContractVerdict
from surefoot.observe.readers.run_data import RunData
from surefoot.observe.readers.runs import RunStatus

MIN_SEEDS = 3
"""Number of seeds on each side required to claim a difference."""


class ComparisonOutcome(StrEnum):
    """Result of comparing one metric."""

    BETTER = "better"
    WORSE = "worse"
    DIFFERENT = "different"
    """Significantly different, but the better direction is unknown."""
    NO_DIFFERENCE = "no difference shown"
    NOT_SHOWN = "not enough evidence"


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs that repeat each other."""

    label: str
    """The letters of its runs."""
    members: tuple[int, ...]
    """Indices among the compared runs."""


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of one experiment against the first one."""

    metric: str
    """SET/METRIC."""
    experiment: str
    direction: str
    """`min`, `max`, or empty if unknown."""
    before: Spread | None
    after: Spread | None
    difference: MeanDifference | None
    outcome: ComparisonOutcome
    reason: str


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Result of a comparison."""

    labels: tuple[str, ...]
    experiments: tuple[Experiment, ...]
    facts: tuple[DifferingFact, ...]
    values: Mapping[str, tuple[tuple[int, float] | None, ...]]
    """For each metric, (step, value) of every run."""
    results: tuple[MetricResult, ...]
    verdicts: tuple[ContractVerdict | None, ...]
    """For each run, the verdict on its own contract."""
    deciding: str | None
    claim: str

    @property
    def stops_a_pipeline(self) -> bool:
        """Whether a run but the first broke its contract, or a metric is significantly worse."""
        broken = any(v is not None and v.standing.value == "broken" for v in self.verdicts[1:])
        return broken or any(result.outcome is ComparisonOutcome.WORSE for result in self.results)


def compare_runs(runs: Sequence[RunData]) -> RunComparison:
    """Compares every run with the first."""
    labels = tuple(_letters(index) for index in range(len(runs)))
    experiments = _experiments(runs, labels)
    values = _values(runs)
    deciding = runs[0].deciding_name()
    results = tuple(_results(runs, experiments, values))
    return RunComparison(
        labels=labels,
        experiments=experiments,
        facts=differing_facts(runs),
        values=values,
        results=results,
        verdicts=tuple(verdict_on(run) for run in runs),
        deciding=deciding,
        claim=_claim(experiments, results, deciding),
    )


def _letters(index: int) -> str:
    size = len(ascii_uppercase)
    return ascii_uppercase[index % size] + (str(index // size) if index >= size else "")


def _experiments(runs: Sequence[RunData], labels: Sequence[str]) -> tuple[Experiment, ...]:
    groups: list[list[int]] = []
    for index, run in enumerate(runs):
        for group in groups:
            first = runs[group[0]]
            same_data = _fingerprints(first) == _fingerprints(run)
            if (
                same_data
                and same_identity(first.extra, run.extra)
                and is_repeat(first.config, run.config)
            ):
                group.append(index)
                break
        else:
            groups.append([index])
    return tuple(Experiment(", ".join(labels[i] for i in group), tuple(group)) for group in groups)


def _fingerprints(run: RunData) -> object:
    data = run.record.get("data")
    return data.get("fingerprints") if isinstance(data, Mapping) else None


def _values(runs: Sequence[RunData]) -> dict[str, tuple[tuple[int, float] | None, ...]]:
    judged = [run.judged(str(run.contract.get("judged", "last"))) for run in runs]
    names = dict.fromkeys(name for of_run in judged for name in of_run)
    return {name: tuple(of_run.get(name) for of_run in judged) for name in names}


def _results(
    runs: Sequence[RunData],
    experiments: Sequence[Experiment],
    values: Mapping[str, Sequence[tuple[int, float] | None]],
) -> Iterator[MetricResult]:
    first = experiments[0]
    for name, of_runs in values.items():
        direction = _direction(name, runs[0])
        if len(experiments) == 1:
            yield _repeats_only(runs, first, name, direction, of_runs)
        for other in experiments[1:]:
            before = _usable(runs, first, of_runs)
            after = _usable(runs, other, of_runs)
            yield _result(name, direction, before, after, first.label, other.label)


def _direction(name: str, run: RunData) -> str:
    metric = name.partition("/")[2]
    _, deciding, direction = run.deciding
    return direction if metric == deciding else usual_direction(metric) or ""


def _usable(
    runs: Sequence[RunData], group: Experiment, of_runs: Sequence[tuple[int, float] | None]
) -> list[float]:
    """Values of the finished runs of an experiment, one per seed."""
    by_seed: dict[object, float] = {}
    for index in group.members:
        pair, run = of_runs[index], runs[index]
        if pair is not None and run.summary.status is RunStatus.FINISHED:
            by_seed.setdefault(run.config.get("seed"), pair[1])
    return list(by_seed.values())


def _repeats_only(
    runs: Sequence[RunData],
    group: Experiment,
    name: str,
    direction: str,
    of_runs: Sequence[tuple[int, float] | None],
) -> MetricResult:
    values = _usable(runs, group, of_runs)
    spread = spread_of(values) if values else None
    if len(values) < 2:
        reason = f"{len(values)} finished run with another seed"
        outcome = ComparisonOutcome.NOT_SHOWN
    else:
        reason = f"{len(values)} seeds of one experiment: the difference is their spread"
        outcome = ComparisonOutcome.NO_DIFFERENCE
    return MetricResult(name, group.label, direction, spread, spread, None, outcome, reason)


def _result(
    name: str,
    direction: str,
    before: Sequence[float],
    after: Sequence[float],
    first: str,
    other: str,
) -> MetricResult:
    def made(
        outcome: ComparisonOutcome, reason: str, found: MeanDifference | None = None
    ) -> MetricResult:
        return MetricResult(
            name,
            other,
            direction,
            spread_of(before) if before else None,
            spread_of(after) if after else None,
            found,
            outcome,
            reason,
        )

    if not all(map(math.isfinite, (*before, *after))):
        return made(ComparisonOutcome.NOT_SHOWN, "a value is not finite")
    if min(len(before), len(after)) < MIN_SEEDS:
        counts = f"{len(before)} and {len(after)} finished seeds"
        return made(ComparisonOutcome.NOT_SHOWN, f"{counts}; {MIN_SEEDS} on each side are needed")
    found = welch(before, after)
    interval = f"95 % interval of the difference [{found.low:.4g}, {found.high:.4g}] (Welch)"
    if not found.excludes_zero:
        return made(ComparisonOutcome.NO_DIFFERENCE, f"{interval} contains 0", found)
    if not direction:
        return made(ComparisonOutcome.DIFFERENT, interval, found)
    is_better = (found.difference < 0) == (direction == "min")
    return made(ComparisonOutcome.BETTER if is_better else ComparisonOutcome.WORSE, interval, found)


def _claim(
    experiments: Sequence[Experiment], results: Sequence[MetricResult], deciding: str | None
) -> str:
    found = [result for result in results if result.metric == deciding] or list(results[:1])
    if not found:
        return "not enough evidence: nothing was evaluated"
    if len(experiments) == 1:
        return f"{found[0].outcome.value}: {found[0].reason}"
    said = []
    for result in found:
        of = f"{result.experiment} against {experiments[0].label}"
        said.append(f"{of}, {result.metric}: {result.outcome.value} ({result.reason})")
    return "; ".join(said)
