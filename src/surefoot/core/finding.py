"""Findings: the one vocabulary of checks, audits, the doctor and the planner.

A finding is a value. It neither prints itself nor decides on an exit code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Severity(Enum):
    """How much it matters."""

    ERROR = "error"
    """The result is wrong or the run will fail."""
    WARNING = "warning"
    """The result is probably not what was intended."""
    HINT = "hint"
    """It works, but something else is known to work better."""


class Certainty(Enum):
    """How it is known."""

    PROOF = "proof"
    """It follows from what was observed; no other reading is possible."""
    STRONG = "strong"
    """Other readings are possible but unlikely."""
    HEURISTIC = "heuristic"
    """A pattern that is often, not always, a mistake."""
    CONVENTION = "convention"
    """Common practice differs, with a cited source."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem or piece of advice, with its place, evidence and fix.

    >>> found = Finding("CFG001", "kind-dropped", Severity.HINT, Certainty.PROOF, "It is dropped.")
    >>> found.as_json()["severity"]
    'hint'
    """

    code: str
    """Stable code, such as `CFG001`."""
    slug: str
    """Stable name, words joined by `-`, such as `constant-rate-for-language-model`."""
    severity: Severity
    certainty: Certainty
    message: str
    file: str = ""
    """File that it concerns; empty if none."""
    line: int = 0
    """Line in `file`, from 1; 0 if none."""
    evidence: Mapping[str, object] = field(default_factory=dict)
    """The numbers and names that support it; JSON-compatible."""
    fix: str = ""
    """What to do."""

    def as_json(self) -> dict[str, object]:
        """Plain data with the keys of every `--json` output."""
        return {
            "code": self.code,
            "slug": self.slug,
            "severity": self.severity.value,
            "certainty": self.certainty.value,
            "message": self.message,
            "file": self.file,
            "line": self.line,
            "evidence": dict(self.evidence),
            "fix": self.fix,
        }
