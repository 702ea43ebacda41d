"""Reads a cause's words from its page, a small Markdown file.

It begins with `code`, `slug`, `family`, `severity`, `certainty`, `title`, and if need be `explains`
and `evidence` (lists), between two lines `---`. Its sections are "What is observed", "Why it is
bad", "Fix", "Source", and "Signs": there, a heading `### NAME, SCORE` (or `NAME, SCORE, CERTAINTY`)
with the message of each.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from surefoot.core.errors import DataError
from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import CauseInfo, SignText

PAGES = Path(__file__).parent / "pages"


def own_page(slug: str) -> CauseInfo:
    """The words of one of the causes of this package."""
    return read_page(PAGES / f"{slug}.md")


def read_page(path: Path) -> CauseInfo:
    """The words of a cause.

    Raises:
        DataError: a key or a section is missing, or has no such value.
    """
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"the page of a cause is not complete: {type(error).__name__} {error}",
            where=str(path),
            rule="it has code, slug, family, severity, certainty and title between two lines ---,"
            " and the sections What is observed, Why it is bad, Fix, Source and Signs",
            remedy="the pages in surefoot/diagnosis/causes/pages are examples",
        ) from error


def _parsed(text: str) -> CauseInfo:
    _, head, body = text.split("---\n", 2)
    facts = yaml.safe_load(head)
    sections = dict(part.split("\n", 1) for part in body.split("\n## ")[1:])
    signs = [part.split("\n", 1) for part in sections["Signs"].split("### ")[1:]]
    if not signs:
        raise ValueError("no sign")
    return CauseInfo(
        code=facts["code"],
        slug=facts["slug"],
        family=facts["family"],
        severity=Severity(facts["severity"]),
        certainty=Certainty(facts["certainty"]),
        title=facts["title"],
        observes=_line(sections["What is observed"]),
        why=_line(sections["Why it is bad"]),
        fix=_line(sections["Fix"]),
        source=_line(sections["Source"]),
        signs={head.split(", ")[0]: _sign(head, message) for head, message in signs},
        evidence=tuple(facts.get("evidence", ())),
        explains=tuple(facts.get("explains", ())),
    )


def _sign(head: str, message: str) -> SignText:
    _, score, *certainty = head.split(", ")
    return SignText(float(score), _line(message), *(Certainty(value) for value in certainty))


def _line(text: str) -> str:
    return " ".join(text.split())
