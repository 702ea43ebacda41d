"""What a cause is: a record that explains it, and a look at the signals that may find it.

A cause judges by numbers of the run's own history. It never prints and never reads a file.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from surefoot.core.finding import Certainty, Finding, Severity
from surefoot.diagnosis.signals import Signals

FAMILIES = {
    "1": "learning rate",
    "2": "gradients",
    "3": "not finite",
    "4": "data and labels",
    "5": "generalisation",
    "6": "loss function",
    "7": "speed and memory",
    "8": "resume",
}


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """What a cause is about; its part of the documentation is made from this."""

    code: str
    slug: str
    severity: Severity
    certainty: Certainty
    title: str
    """One sentence: what went wrong."""
    observes: str
    """What is looked at, and where the rule stays quiet."""
    why: str
    fix: str
    """The first thing to try, then others."""
    source: str
    needs: tuple[str, ...]
    """Quantities without which it cannot be told; `A or B` where one of them will do."""
    explains: tuple[str, ...] = ()
    """Slugs of what is only its consequence, where both are found."""

    @property
    def family(self) -> str:
        return FAMILIES[self.code[3]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a look has found.

    Args:
        message: what was seen, with numbers and steps.
        weight: how well it fits, from 0 to 1; the highest is named first.
        evidence: the numbers that it rests on.
    """

    message: str
    weight: float
    evidence: Mapping[str, object] = field(default_factory=dict)
    certainty: Certainty | None = None
    """Where it is another than that of the rule."""


class Cause(abc.ABC):
    """One kind of bad run. Define `info` and `look`."""

    info: ClassVar[CauseInfo]

    @abc.abstractmethod
    def look(self, signals: Signals) -> Verdict | None:
        """What it has to say of this run; it is asked only where all that it needs was recorded."""

    @classmethod
    def finding(cls, verdict: Verdict, file: str) -> Finding:
        info = cls.info
        return Finding(
            code=info.code,
            slug=info.slug,
            severity=info.severity,
            certainty=verdict.certainty or info.certainty,
            message=verdict.message,
            file=file,
            evidence=dict(verdict.evidence),
            fix=info.fix,
        )
