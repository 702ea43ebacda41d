"""Builds HTML. All text is escaped here: what a run recorded is data, never markup."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from surefoot.observe.formatting import format_bytes, format_duration, format_number


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that needs no further escaping."""

    text: str


@dataclass(frozen=True, slots=True)
class PageSection:
    """One section of a page."""

    id: str
    title: str
    body: str


def escape(value: object) -> str:
    """Text as HTML; markup unchanged."""
    return value.text if isinstance(value, Markup) else html.escape(str(value))


def tag(name: str, *children: object, **attributes: str) -> Markup:
    """An element; an attribute `class_` is `class`, other underscores are hyphens."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{named}>{''.join(map(escape, children))}</{name}>")


def chip(text: str, level: str = "") -> Markup:
    """A small coloured label: level `good`, `bad`, `warn` or none."""
    return tag("span", text, class_=f"chip {level}".strip())


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Sequence[int] = (),
    kinds: str = "",
    stack: bool = True,
) -> str:
    """A table; on a narrow screen its rows become blocks.

    Args:
        numbers: right-aligned columns.
        kinds: class of the first column's cells.
        stack: False keeps a table that scrolls on narrow screens.
    """
    shown = []
    for row in rows:
        cells = []
        for index, value in enumerate(row):
            kind = "n" if index in numbers else kinds if index == 0 else ""
            attributes = {"data_label": head[index]} if head and head[index] else {}
            cells.append(tag("td", value, **({"class_": kind} if kind else {}), **attributes).text)
        shown.append(f"<tr>{''.join(cells)}</tr>")
    titles = "".join(
        tag("th", title, **({"class_": "n"} if index in numbers else {})).text
        for index, title in enumerate(head)
    )
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    name = ' class="stack"' if stack else ""
    return f'<div class="scroll"><table{name}>{top}<tbody>{"".join(shown)}</tbody></table></div>'


def details(summary: str, body: str, *, open_: bool = False) -> str:
    """A collapsible section."""
    state = " open" if open_ else ""
    return f"<details{state}><summary>{html.escape(summary)}</summary>{body}</details>"


def facts(pairs: Iterable[tuple[str, object, object]]) -> str:
    """Headline figures: name, value, and a smaller line below."""
    shown = []
    for name, value, below in pairs:
        small = f"<small>{escape(below)}</small>" if below else ""
        shown.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>")
    return f'<dl class="facts">{"".join(shown)}</dl>'


def embedded_json(value: Any, name: str) -> str:
    """Data for the script of the page, escaped so that it cannot end its element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f'<script type="application/json" id="{name}">{safe}</script>'


def number(value: object) -> str:
    """A metric as text; a dash for None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "–"
    if isinstance(value, int) or (math.isfinite(value) and value.is_integer() and abs(value) < 1e9):
        return f"{int(value):,}"
    return format_number(value)


def size(value: object) -> str:
    """A number of bytes as text; a dash for None."""
    known = isinstance(value, int | float) and math.isfinite(value)
    return format_bytes(float(str(value))) if known else "–"


def duration(seconds: float | None) -> str:
    """A duration as text; one decimal below ten seconds."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def moment(unix: float) -> str:
    """Local date and time."""
    return datetime.fromtimestamp(unix).strftime("%Y-%m-%d %H:%M:%S") if unix else "–"
