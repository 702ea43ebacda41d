"""What a rule is: words that explain it, handlers for events, and findings at the end."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import yaml

from surefoot.core.finding import Certainty, Finding, Severity
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.listener import Listener
from surefoot.sanitizer.matchers.tallies import Looks, Tally, UpdateTally, look_now, share

__all__ = [
    "NOWHERE",
    "Certainty",
    "Finding",
    "Findings",
    "Looks",
    "Rule",
    "RuleInfo",
    "Site",
    "Tally",
    "UpdateTally",
    "look_now",
    "share",
]
Findings: TypeAlias = Iterable[Finding]
_SEVERITY = {
    Certainty.PROOF: Severity.ERROR,
    Certainty.STRONG: Severity.WARNING,
    Certainty.HEURISTIC: Severity.HINT,
    Certainty.CONVENTION: Severity.HINT,
}


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """The words of a rule."""

    code: str
    """Letters and digits, such as `SF101`; one rule has it."""
    slug: str
    certainty: Certainty
    title: str
    """One sentence: what is wrong."""
    observes: str
    """What the audit looks at, and where it stays quiet."""
    why: str
    """Why it is bad."""
    fix: str
    example: str = ""
    """A few lines of code that it finds."""
    source: str = ""
    """Where this was seen, or what it follows from."""

    @classmethod
    def beside(cls, file: str) -> RuleInfo:
        """Reads the page of a rule: the Markdown file beside its module, of the same name.

        The page begins with `code`, `slug`, `certainty` and `title` between two lines `---`; its
        sections are "What is observed", "Why it is bad", "Example", "Fix" and "Source".
        """
        text = Path(file).with_suffix(".md").read_text(encoding="utf-8")
        _, head, body = text.split("---\n", 2)
        parts = (section.split("\n", 1) for section in body.split("\n## ")[1:])
        sections = {name: " ".join(words.split()) for name, words in parts}
        facts = yaml.safe_load(head)
        return cls(
            code=facts["code"],
            slug=facts["slug"],
            certainty=Certainty(facts["certainty"]),
            title=facts["title"],
            observes=sections["What is observed"],
            why=sections["Why it is bad"],
            fix=sections["Fix"],
            example=body.partition("```python\n")[2].partition("\n```")[0],
            source=sections["Source"],
        )

    @property
    def severity(self) -> Severity:
        return _SEVERITY[self.certainty]


class Rule(Listener, abc.ABC):
    """One kind of silent bug: `info`, any of the `on_...` handlers of events, and `findings`.

    `class MyRule(Rule, page=__file__)` reads `info` from the page beside the module.
    """

    info: ClassVar[RuleInfo]

    def __init_subclass__(cls, page: str = "") -> None:
        super().__init_subclass__()
        if page:
            cls.info = RuleInfo.beside(page)

    @abc.abstractmethod
    def findings(self) -> Findings:
        """What this rule has to say, once the script is over."""

    def facts(self) -> Any:
        """JSON-able numbers to be compared with those of other ranks; None for none."""
        return None

    @classmethod
    def across(cls, facts: Mapping[int, Any]) -> Findings:
        """Findings that only the comparison of ranks shows; `facts` by rank."""
        return ()

    @classmethod
    def report(
        cls,
        message: str,
        site: Site = NOWHERE,
        *,
        fix: str = "",
        certainty: Certainty | None = None,
        **evidence: object,
    ) -> Finding:
        """A finding of this rule; the other keywords are the evidence.

        A lower `certainty` than that of the rule lowers the severity with it.
        """
        known = certainty or cls.info.certainty
        return Finding(
            code=cls.info.code,
            slug=cls.info.slug,
            severity=_SEVERITY[known],
            certainty=known,
            message=message,
            file=site.file,
            line=site.line,
            evidence=evidence,
            fix=fix or cls.info.fix,
        )
