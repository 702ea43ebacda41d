"""What one audited process has to say, and how it hands that over. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.core.finding import Certainty, Finding, Severity

RUNNING = "running"
"""The outcome that a process leaves behind which was ended from outside."""


@dataclass
class Summary:
    """What one process has to say; JSON-able by `as_json`."""

    rank: int
    outcome: str
    updates: int
    findings: list[Finding]
    facts: dict[str, Any] = field(default_factory=dict)
    internal_errors: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        plain["findings"] = [finding.as_json() for finding in self.findings]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Summary:
        values = dict(plain)
        values["findings"] = [_finding(f) for f in plain["findings"]]
        return cls(**values)


def _finding(plain: Mapping[str, Any]) -> Finding:
    values = dict(plain)
    values["severity"] = Severity(plain["severity"])
    values["certainty"] = Certainty(plain["certainty"])
    return Finding(**values)


def failure(where: str) -> str:
    """The error that is being handled: a line that names it, then its traceback."""
    error = sys.exc_info()[1]
    return f"{where}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"


_RANKING = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.HINT: 2}


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """By severity, code and place, each place once per code."""
    unique = {(f.code, f.file, f.line, f.message): f for f in findings}
    return sorted(unique.values(), key=lambda f: (_RANKING[f.severity], f.code, f.file, f.line))


def write_report(summary: Summary, folder: Path) -> None:
    """Leaves what this process saw where the one that started it looks; a later one replaces it."""
    file = folder / f"report-{os.getpid()}.json"
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(summary.as_json(), default=str), encoding="utf-8")
    temporary.replace(file)


def read_reports(folder: Path) -> list[Summary]:
    """What all processes left behind, by rank."""
    files = sorted(folder.glob("report-*.json"))
    found = [Summary.from_json(json.loads(file.read_text(encoding="utf-8"))) for file in files]
    return sorted(found, key=lambda summary: summary.rank)
