"""The evidence that each kind of result requires in addition to its metrics. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from surefoot.judge.repeats import repeats_beside
from surefoot.judge.verdict import Clause, Standing
from surefoot.observe.readers.run_data import RunData

MIN_BENCHMARK_SEEDS = 3
"""Number of seeds for a benchmark: two do not show a spread."""


def _evaluation(run: RunData) -> tuple[bool, str, str]:
    name = run.deciding_name()
    history = [] if name is None else run.history(name)
    return bool(history), f"{len(history)} evaluations of {name or 'nothing'}", "evaluate it once"


def _data(run: RunData) -> tuple[bool, str, str]:
    prints = _within(run.record, "data", "fingerprints")
    found = ", ".join(f"{name} {value}" for name, value in prints.items())
    return bool(prints), found or "no fingerprint was recorded", "the record was lost; run it again"


def _code(run: RunData) -> tuple[bool, str, str]:
    git = _within(run.record, "git")
    commit = git.get("commit")
    if not commit:
        return False, "no commit is known", "run it inside a repository"
    if git.get("dirty"):
        return False, f"{commit} with uncommitted changes", "commit them and run it again"
    return True, str(commit), ""


def _environment(run: RunData) -> tuple[bool, str, str]:
    packages = _within(run.record, "packages")
    return bool(packages), f"{len(packages)} packages recorded", "run it again"


def _repeats(run: RunData) -> tuple[bool, str, str]:
    seeds = repeats_beside(run)
    said = f"{len(seeds)} finished runs that differ only in the seed: {sorted(seeds)}"
    missing = MIN_BENCHMARK_SEEDS - len(seeds)
    return missing <= 0, said, f"train {missing} more with other values of seed"


def _base_weights(run: RunData) -> tuple[bool, str, str]:
    weights = _within(run.config, "model").get("initial_weights", "none")
    return weights != "none", f"model.initial_weights {weights}", "name the weights"


Look = Callable[[RunData], tuple[bool, str, str]]
"""Whether it exists, what was found, and the remedy if it does not."""

EVIDENCE: Mapping[str, tuple[str, Look]] = {
    "evaluation": ("the deciding metric is evaluated", _evaluation),
    "data": ("every data set has a fingerprint", _data),
    "code": ("the code is a commit without changes", _code),
    "environment": ("the packages are recorded", _environment),
    "repeats": (f"at least {MIN_BENCHMARK_SEEDS} seeds", _repeats),
    "base weights": ("the weights that were adapted are named", _base_weights),
}

DEMANDED: Mapping[str, tuple[str, ...]] = {
    "research": ("evaluation",),
    "adapter": ("evaluation", "data", "base weights"),
    "benchmark": ("evaluation", "data", "code", "environment", "repeats"),
    "production_candidate": ("evaluation", "data", "code", "environment"),
}
"""Required evidence by kind of result."""


def evidence_of(run: RunData, kind: str) -> Iterator[Clause]:
    """A clause for each piece of evidence that the kind of result requires.

    Raises:
        KeyError: unknown kind.
    """
    for name in DEMANDED[kind]:
        promised, look = EVIDENCE[name]
        is_there, found, remedy = look(run)
        standing = Standing.HELD if is_there else Standing.NOT_SHOWN
        yield Clause(f"evidence.{name}", standing, promised, found, "" if is_there else remedy)


def _within(values: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        inner = values.get(name)
        values = inner if isinstance(inner, Mapping) else {}
    return values
