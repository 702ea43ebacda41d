"""Asks every cause, and puts what they say in order. It interprets no number itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.core.finding import Finding
from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.causes import CauseRegistry, LeftOut, all_causes, cause_registry
from surefoot.diagnosis.causes.base import Cause, Observation
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.recording import Objective, Recording


@dataclass(frozen=True, slots=True)
class Undetermined:
    """Causes that could not be judged, and the quantity that was not recorded."""

    missing: str
    slugs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor has to say.

    Attributes:
        findings: the most likely cause first.
        consequences: findings that one of those explains.
        objective: what the run optimizes; where it is no loss that falls, none is judged.
        has_loss: whether a loss was read; else nothing can be said of the training.
        undetermined: by missing quantity, what cannot be judged without it.
        left_out: causes that raised an error, or could not be imported.
    """

    source: str
    kind: str
    num_rows: int
    last_step: int
    recorded: tuple[str, ...]
    ignored: tuple[str, ...]
    findings: tuple[Finding, ...]
    consequences: tuple[Finding, ...]
    undetermined: tuple[Undetermined, ...]
    objective: Objective = Objective.LOSS
    has_loss: bool = True
    left_out: tuple[LeftOut, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found in what was recorded."""
        return not self.findings

    @property
    def judges_loss(self) -> bool:
        """Whether the training loss was judged: it falls as the model learns."""
        return self.objective is Objective.LOSS

    @property
    def is_too_short(self) -> bool:
        return self.num_rows < limits.MIN_ROWS


def examine(recording: Recording, causes: Sequence[Cause] = ()) -> Diagnosis:
    """What the causes have to say of a recorded run.

    Args:
        causes: further causes, asked beside those that are installed.

    Raises:
        RequestError: a further cause has the code or the slug of another one.
    """
    log = LogFeatures(recording)
    registry = CauseRegistry({cause.info.code: cause for cause in all_causes()})
    for cause in causes:
        registry.include(cause)
    undetermined: dict[str, list[str]] = {}
    left_out = list(cause_registry().left_out)
    found: list[tuple[Cause, Observation]] = []
    for cause in registry.causes.values():
        missing = [need.name for need in cause.needs if not need.is_met(recording)]
        for name in missing:
            undetermined.setdefault(name, []).append(cause.info.slug)
        try:
            seen = None if missing else cause.observe(log)
        except Exception as error:  # One that fails does not silence the others.
            reason = f"{type(error).__name__}: {error}"
            left_out.append(LeftOut(cause.info.slug, cause.origin, reason))
        else:
            if seen is not None:
                found.append((cause, seen))
    found.sort(key=lambda pair: -pair[1].score)
    explained = _explained(found)
    findings = [(cause.info.slug, cause.finding(seen, recording.source)) for cause, seen in found]
    return Diagnosis(
        source=recording.source,
        kind=recording.kind,
        num_rows=recording.num_rows,
        last_step=recording.last_step,
        recorded=(*recording.columns, *recording.evaluations),
        ignored=tuple(recording.ignored),
        findings=tuple(finding for slug, finding in findings if slug not in explained),
        consequences=tuple(finding for slug, finding in findings if slug in explained),
        undetermined=tuple(
            Undetermined(name, tuple(slugs)) for name, slugs in sorted(undetermined.items())
        ),
        objective=recording.objective,
        has_loss=recording.has_loss,
        left_out=tuple(left_out),
    )


def _explained(found: Sequence[tuple[Cause, Observation]]) -> set[str]:
    """Slugs of what another finding explains; of two that explain each other, the less likely."""
    explained: set[str] = set()
    for cause, seen in found:
        for other, its_own in found:
            names = other.info.slug in cause.info.explains
            mutual = cause.info.slug in other.info.explains
            if names and not (mutual and its_own.score >= seen.score):
                explained.add(other.info.slug)
    return explained
