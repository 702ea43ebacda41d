"""One audit of one process: trace, probe and rules together, and the findings at the end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from surefoot.core.finding import Certainty, Finding, Severity
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE
from surefoot.sanitizer.probe import Probe
from surefoot.sanitizer.rules import all_rules
from surefoot.sanitizer.rules.base import Rule
from surefoot.sanitizer.suppressions import is_suppressed
from surefoot.sanitizer.trace import StopAudit, Trace


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


class Audit:
    """Watches the code that runs inside its `with`; afterwards `findings` holds what was seen.

    >>> from surefoot.sanitizer.session import Audit
    >>> with Audit() as audit:
    ...     pass
    >>> audit.findings
    []
    """

    def __init__(
        self,
        *,
        deep: bool = False,
        max_updates: int | None = None,
        rules: Iterable[type[Rule]] | None = None,
    ) -> None:
        self.trace = Trace(deep=deep, max_updates=max_updates)
        self.probe = Probe(self.trace)
        self.rules = [rule(self.trace) for rule in (all_rules() if rules is None else rules)]
        for rule in self.rules:
            self.trace.listen(rule)
        self.findings: list[Finding] = []
        self.outcome = ""

    def __enter__(self) -> Audit:
        self.probe.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self.end(_outcome(error))
        return isinstance(error, StopAudit)

    def end(self, outcome: str) -> None:
        """Detaches and asks the rules; may be called once."""
        self.outcome = outcome
        for report in self.trace.before_end:
            self.trace.safely(report)
        self.trace.safely(
            self.trace.emit, ev.RunEnded(seq=self.trace.tick(), site=NOWHERE, outcome=outcome)
        )
        self.probe.detach()
        for rule in self.rules:
            try:
                self.findings += [f for f in rule.findings() if not is_suppressed(f)]
            except Exception:
                self.trace.note_error(type(rule).__name__)
        self.findings = ordered(self.findings)

    def summary(self) -> Summary:
        facts = {}
        for rule in self.rules:
            try:
                value = rule.facts()
            except Exception:
                self.trace.note_error(type(rule).__name__)
                continue
            if value is not None:
                facts[rule.info.code] = value
        rank = self.trace.rank
        return Summary(
            rank=int(os.environ.get("RANK", "0") or 0) if rank is None else rank,
            outcome=self.outcome,
            updates=self.trace.updates,
            findings=self.findings,
            facts=facts,
            internal_errors=self.trace.internal_errors,
        )


def _outcome(error: BaseException | None) -> str:
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "completed"
    if isinstance(error, StopAudit):
        return "stopped"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "crashed"


_RANKING = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.HINT: 2}


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """By severity, code and place, each place once per code."""
    unique = {(f.code, f.file, f.line, f.message): f for f in findings}
    return sorted(unique.values(), key=lambda f: (_RANKING[f.severity], f.code, f.file, f.line))


def merged(summaries: Iterable[Summary]) -> list[Finding]:
    """The findings of several processes as one list, with ranks named."""
    summaries = list(summaries)
    if len(summaries) == 1:
        return summaries[0].findings
    ranks: dict[tuple[str, str, int], set[int]] = {}
    first: dict[tuple[str, str, int], Finding] = {}
    for summary in summaries:
        for finding in summary.findings:
            key = (finding.code, finding.file, finding.line)
            ranks.setdefault(key, set()).add(summary.rank)
            first.setdefault(key, finding)
    found = [
        dataclasses.replace(f, evidence={**f.evidence, "ranks": sorted(ranks[key])})
        for key, f in first.items()
    ]
    for rule in all_rules():
        facts = {s.rank: s.facts[rule.info.code] for s in summaries if rule.info.code in s.facts}
        if len(facts) > 1:
            found += [f for f in rule.across(facts) if not is_suppressed(f)]
    return ordered(found)
