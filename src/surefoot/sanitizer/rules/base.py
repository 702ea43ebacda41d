"""What a rule is: a record that explains it, handlers for events, and findings at the end.

A rule keeps counters, names and sites; never tensors, modules or events.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from surefoot.core.finding import Certainty, Finding, Severity
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.trace import Trace

FAMILIES = {
    "1": "clipping and gradient lifecycle",
    "2": "accumulation",
    "3": "schedule",
    "4": "modes and normalisation",
    "5": "optimizer and parameter coverage",
    "6": "loss",
    "7": "logging and data",
    "8": "distribution",
    "9": "resume and precision",
}
_SEVERITY = {
    Certainty.PROOF: Severity.ERROR,
    Certainty.STRONG: Severity.WARNING,
    Certainty.HEURISTIC: Severity.HINT,
    Certainty.CONVENTION: Severity.HINT,
}


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What a rule is about; its page in the documentation is made from this."""

    code: str
    slug: str
    certainty: Certainty
    title: str
    """One sentence: what is wrong."""
    observes: str
    """What the audit looks at, and where it stays quiet."""
    why: str
    example: str
    """A few lines of code that it finds."""
    fix: str
    source: str
    """Where this was seen, or what it follows from."""

    @property
    def family(self) -> str:
        return FAMILIES[self.code[2]]

    @property
    def severity(self) -> Severity:
        return _SEVERITY[self.certainty]


class Rule(abc.ABC):
    """One kind of silent bug.

    Define `info`, any of the `on_...` handlers (named after the events: `BackwardEnd` calls
    `on_backward_end`), and `findings`.
    """

    info: ClassVar[RuleInfo]

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @abc.abstractmethod
    def findings(self) -> Iterable[Finding]:
        """What this rule has to say, once the script is over."""

    def facts(self) -> Any:
        """JSON-able numbers to be compared with those of other ranks; None for none."""
        return None

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Iterable[Finding]:
        """Findings that only the comparison of ranks shows; `facts` by rank."""
        return ()

    @classmethod
    def report(
        cls,
        message: str,
        site: Site = NOWHERE,
        *,
        evidence: Mapping[str, object] | None = None,
        fix: str = "",
        certainty: Certainty | None = None,
        severity: Severity | None = None,
    ) -> Finding:
        """A finding of this rule. A lower `certainty` lowers the severity with it."""
        known = certainty or cls.info.certainty
        return Finding(
            code=cls.info.code,
            slug=cls.info.slug,
            severity=severity or _SEVERITY[known],
            certainty=known,
            message=message,
            file=site.file,
            line=site.line,
            evidence=dict(evidence or {}),
            fix=fix or cls.info.fix,
        )


class Tally:
    """Counts occurrences by place."""

    def __init__(self) -> None:
        self.sites: Counter[Site] = Counter()

    def add(self, site: Site) -> None:
        # Bounded: what is seen at a thousand places is not told by place any more.
        if len(self.sites) < 1000 or site in self.sites:
            self.sites[site] += 1

    @property
    def count(self) -> int:
        return self.sites.total()

    @property
    def site(self) -> Site:
        return self.sites.most_common(1)[0][0] if self.sites else NOWHERE


def share(part: int, whole: int) -> str:
    """`40 of 40`."""
    return f"{part} of {whole}"
