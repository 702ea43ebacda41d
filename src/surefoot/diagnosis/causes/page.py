"""Reads a cause's words from its page, a small Markdown file.

It begins with `key: value` lines between two `---`; then come the title, the sections `Looked at`,
`Why it is bad` and `Fix`, and under `Signs` one heading `### NAME, SCORE` (or `NAME, SCORE,
CERTAINTY`) with its message for each.
"""

from __future__ import annotations

from pathlib import Path

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
        DataError: a key, the title or a section is missing, or a value is none.
    """
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"the page of a cause is not complete: {type(error).__name__} {error}",
            where=str(path),
            rule="it has keys between two lines ---, a title, and the sections Looked at,"
            " Why it is bad, Fix and Signs",
            remedy="the pages in surefoot/diagnosis/causes/pages are examples",
        ) from error


def _parsed(text: str) -> CauseInfo:
    _, head, body = text.split("---\n", 2)
    keys = dict(line.split(": ", 1) for line in head.splitlines())
    title, *parts = body.split("\n## ")
    sections = dict(part.split("\n", 1) for part in parts)
    signs = [part.split("\n", 1) for part in sections["Signs"].split("### ")[1:]]
    return CauseInfo(
        code=keys["code"],
        slug=keys["slug"],
        family=keys["family"],
        severity=Severity(keys["severity"]),
        certainty=Certainty(keys["certainty"]),
        title=_line(title.split("# ", 1)[1]),
        observes=_line(sections["Looked at"]),
        why=_line(sections["Why it is bad"]),
        fix=_line(sections["Fix"]),
        source=keys["source"],
        signs={head.split(", ")[0]: _sign(head, message) for head, message in signs},
        evidence=_names(keys.get("evidence", "")),
        explains=_names(keys.get("explains", "")),
    )


def _sign(head: str, message: str) -> SignText:
    _, score, *certainty = head.split(", ")
    return SignText(float(score), _line(message), *(Certainty(value) for value in certainty))


def _line(text: str) -> str:
    return " ".join(text.split())


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(", ") if name)
