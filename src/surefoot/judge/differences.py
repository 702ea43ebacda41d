"""Differences between runs in configuration, code, data and environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.config.load import ABSENT
from surefoot.judge.repeats import identity_facts
from surefoot.observe.readers.run_data import RunData


@dataclass(frozen=True, slots=True)
class DifferingFact:
    """One fact that differs between runs."""

    area: str
    """`model`, `config`, `code`, `data` or `environment`."""
    name: str
    values: tuple[str, ...]
    """One per run, in order."""


def differing_facts(runs: Sequence[RunData]) -> tuple[DifferingFact, ...]:
    """All recorded facts that differ between runs."""
    found = []
    for area, facts_of in (
        ("model", lambda run: identity_facts(run.extra)),
        ("config", lambda run: dict(flat(run.config))),
        ("code", _code),
        ("data", _data),
        ("environment", _environment),
    ):
        facts = [facts_of(run) for run in runs]
        for name in dict.fromkeys(name for of_run in facts for name in of_run):
            values = [of_run.get(name, ABSENT) for of_run in facts]
            if any(value != values[0] for value in values):
                found.append(DifferingFact(area, name, tuple(map(str, values))))
    return tuple(found)


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is not a mapping; a list counts as one value."""
    for key, value in values.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, path)
        else:
            yield path, value


def _code(run: RunData) -> dict[str, Any]:
    git = _within(run.record, "git")
    return {
        "commit": git.get("commit") or "unknown",
        "uncommitted changes": git.get("diff_sha256") or "none",
    }


def _data(run: RunData) -> dict[str, Any]:
    return dict(_within(_within(run.record, "data"), "fingerprints"))


def _environment(run: RunData) -> dict[str, Any]:
    record = run.record
    cpu = _within(_within(record, "hardware"), "cpu")
    gpus = _within(record, "hardware").get("gpus")
    return {
        "host": _within(record, "system").get("host", ""),
        "device": run.extra.get("device", ""),
        "precision": _within(run.extra, "precision").get("name", ""),
        "cpu": cpu.get("name", ""),
        "gpus": ", ".join(str(gpu.get("name")) for gpu in gpus) if isinstance(gpus, list) else "",
        "python": _within(record, "python").get("version", ""),
        **dict(flat(_within(record, "environment"), "variable")),
        **dict(flat(_within(record, "torch"), "torch")),
        **dict(flat(_within(record, "packages"), "package")),
    }


def _within(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = values.get(name)
    return inner if isinstance(inner, Mapping) else {}
