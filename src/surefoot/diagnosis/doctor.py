"""Asks every cause, and puts what they say in order. It interprets no number itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.core.finding import Finding
from surefoot.diagnosis.causes import all_causes
from surefoot.diagnosis.causes.base import Cause, Verdict
from surefoot.diagnosis.recording import Recording
from surefoot.diagnosis.signals import SHORTEST, Signals

VALIDATION = "validation loss"


@dataclass(frozen=True, slots=True)
class Untold:
    """Causes that could not be told, and the signal that is missing."""

    signal: str
    slugs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor has to say.

    Attributes:
        findings: the most likely cause first.
        consequences: findings that one of those explains.
        untold: by missing signal, what cannot be said without it.
    """

    source: str
    kind: str
    num_rows: int
    last_step: int
    recorded: tuple[str, ...]
    ignored: tuple[str, ...]
    findings: tuple[Finding, ...]
    consequences: tuple[Finding, ...]
    untold: tuple[Untold, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found in what was recorded."""
        return not self.findings

    @property
    def is_too_short(self) -> bool:
        return self.num_rows < SHORTEST


OR = " or "
"""Between quantities of `CauseInfo.needs` of which one will do."""


def examine(recording: Recording) -> Diagnosis:
    """Every cause's opinion on what a run recorded."""
    signals = Signals(recording)
    untold: dict[str, list[str]] = {}
    found: list[tuple[type[Cause], Verdict]] = []
    for cause in all_causes():
        missing = [name for name in cause.info.needs if not _has(recording, name)]
        for name in missing:
            untold.setdefault(name, []).append(cause.info.slug)
        if not missing and (verdict := cause().look(signals)) is not None:
            found.append((cause, verdict))
    found.sort(key=lambda pair: -pair[1].weight)
    explained = _explained(found)
    recorded = [*recording.columns, *recording.evaluations]
    return Diagnosis(
        source=recording.source,
        kind=recording.kind,
        num_rows=recording.num_rows,
        last_step=recording.last_step,
        recorded=tuple(recorded),
        ignored=tuple(recording.ignored),
        findings=_findings(found, explained, recording, inside=False),
        consequences=_findings(found, explained, recording, inside=True),
        untold=tuple(Untold(name, tuple(slugs)) for name, slugs in sorted(untold.items())),
    )


def _explained(found: Sequence[tuple[type[Cause], Verdict]]) -> set[str]:
    """Slugs of what another finding explains; of two that explain each other, the less likely."""
    explained: set[str] = set()
    for cause, verdict in found:
        for other, its_verdict in found:
            names = other.info.slug in cause.info.explains
            mutual = cause.info.slug in other.info.explains
            if names and not (mutual and its_verdict.weight >= verdict.weight):
                explained.add(other.info.slug)
    return explained


def _findings(
    found: Sequence[tuple[type[Cause], Verdict]],
    explained: set[str],
    recording: Recording,
    *,
    inside: bool,
) -> tuple[Finding, ...]:
    return tuple(
        cause.finding(verdict, recording.source)
        for cause, verdict in found
        if (cause.info.slug in explained) is inside
    )


def _has(recording: Recording, name: str) -> bool:
    """Whether a signal of `CauseInfo.needs` was recorded."""
    if OR in name:
        return any(_has(recording, one) for one in name.split(OR))
    if name == VALIDATION:
        return len(recording.validation[1]) > 0
    if name == "events":
        return len(recording.events) > 0
    if name.endswith("/NAME"):
        return len(recording.family(name.removesuffix("/NAME"))) > 1
    return recording.has(name)
