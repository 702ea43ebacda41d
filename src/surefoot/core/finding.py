"""What a check, an audit, the doctor or the planner has to say: one vocabulary for all of them.

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
    """The result is probably not what was meant."""
    HINT = "hint"
    """It works, and something else is known to work better."""


class Certainty(Enum):
    """How it is known."""

    PROOF = "proof"
    """It follows from what was observed; no other reading is possible."""
    STRONG = "strong"
    """Other readings are possible but unlikely."""
    HEURISTIC = "heuristic"
    """A pattern that is often, not always, a mistake."""
    CONVENTION = "convention"
    """The field does it otherwise, with a named source."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is worth saying, with its place, evidence and fix."""

    code: str
    """Stable code, such as `CFG001`."""
    slug: str
    """Stable name, words joined by `-`, such as `constant-rate-for-language-model`."""
    severity: Severity
    certainty: Certainty
    message: str
    file: str = ""
    """File that it is about; empty where it is about none."""
    line: int = 0
    """Line in `file`, from 1; 0 where it is about no line."""
    evidence: Mapping[str, object] = field(default_factory=dict)
    """The numbers and names that it rests on; JSON-able."""
    fix: str = ""
    """What to do."""

    def as_json(self) -> dict[str, object]:
        """Plain data with the keys that every `--json` output uses."""
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
