"""One audit of one process: trace, probe and rules together, and the findings at the end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Literal

from surefoot.core.errors import RequestError
from surefoot.core.finding import Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE
from surefoot.sanitizer.probe import Probe
from surefoot.sanitizer.request import StopAudit
from surefoot.sanitizer.rules import all_rules, registry
from surefoot.sanitizer.rules.base import Rule
from surefoot.sanitizer.summary import Summary, ordered
from surefoot.sanitizer.suppressions import is_suppressed
from surefoot.sanitizer.trace import Trace


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
        """Looks at `rules`, by default at all that are installed."""
        self.trace = Trace(deep=deep, max_updates=max_updates)
        self.probe = Probe(self.trace)
        if rules is None:
            self.trace.internal_errors += registry().left_out
            rules = all_rules()
        self.rules: list[Rule] = []
        for rule in rules:
            self._begin(rule)
        self.findings: list[Finding] = []
        self.outcome = ""
        self.rank_by_name = int(os.environ.get("RANK", "0") or 0)
        """Rank where no process group tells."""

    def add(self, rule: type[Rule]) -> None:
        """Looks at one more rule.

        Raises:
            RequestError: it is no rule, or has the code of another one.
        """
        if not (isinstance(rule, type) and issubclass(rule, Rule) and hasattr(rule, "info")):
            raise RequestError(
                f"{rule!r} is no rule",
                rule="a rule is a class derived from surefoot.sanitizer.rules.Rule, with `info`",
            )
        taken = next((r for r in self.rules if r.info.code == rule.info.code), None)
        if taken is not None:
            raise RequestError(
                f"{rule.__name__} has the code of {type(taken).__name__}, {rule.info.code}",
                rule="a code means one rule",
                remedy="give it a code of its own",
            )
        self._begin(rule)

    def _begin(self, kind: type[Rule]) -> None:
        try:
            rule = kind(self.trace)
        except Exception:
            self.trace.note_error(kind.__name__)
            return
        self.rules.append(rule)
        self.trace.listen(rule)

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

    def end(self, outcome: str = "completed") -> None:
        """Detaches and asks the rules; once ended it stays so."""
        if self.outcome:
            return
        self.outcome = self.trace.outcome = outcome
        for report in self.trace.before_end:
            self.trace.safely(report)
        self.trace.safely(
            self.trace.emit, ev.RunEnded(seq=self.trace.tick(), site=NOWHERE, outcome=outcome)
        )
        self.probe.detach()
        self.findings = self._found()

    def _found(self) -> list[Finding]:
        found: list[Finding] = []
        for rule in self.rules:
            if rule.has_failed:
                continue
            try:
                found += [f for f in rule.findings() if not is_suppressed(f)]
            except Exception:
                self.trace.note_error(type(rule).__name__)
        return ordered(found)

    def summary(self, outcome: str = "") -> Summary:
        """What there is to say; with an `outcome`, of an audit that has not ended yet."""
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
            rank=self.rank_by_name if rank is None else rank,
            outcome=outcome or self.outcome,
            updates=self.trace.updates,
            findings=self._found() if outcome else self.findings,
            facts=facts,
            internal_errors=self.trace.internal_errors,
        )


def audit(
    *,
    level: Literal["light", "deep"] = "light",
    steps: int | None = None,
    rules: Iterable[type[Rule]] = (),
) -> Audit:
    """Watches the training loop inside a `with`, and changes no number of it.

    Args:
        level: `light` reads values of CPU tensors only; `deep` those of other devices too.
        steps: ends the `with` block after so many updates.
        rules: rules of your own, besides all that are installed.

    Returns:
        A context manager. When it has ended, its `findings` are sorted by severity; each has
        `code`, `slug`, `severity`, `certainty`, `message`, `file`, `line`, `evidence` and `fix`.

    Raises:
        RequestError: there is no such level, fewer than one step is asked for, or one of `rules`
            is no rule or has the code of another one.

    >>> import torch
    >>> from torch import nn
    >>> with audit() as watch:
    ...     model = nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     for _ in range(4):
    ...         model(torch.ones(8, 2)).sum().backward()
    ...         optimizer.step()
    >>> [finding.slug for finding in watch.findings]
    ['missing-zero-grad']
    """
    if level not in ("light", "deep"):
        raise RequestError(f"there is no level {level!r}", rule="one of light, deep")
    if steps is not None and steps < 1:
        raise RequestError(f"an audit of {steps} updates sees nothing", rule="steps >= 1")
    watch = Audit(deep=level == "deep", max_updates=steps)
    for rule in rules:
        watch.add(rule)
    return watch


def _outcome(error: BaseException | None) -> str:
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "completed"
    if isinstance(error, StopAudit):
        return "stopped"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "crashed"
