"""Assembles a page from its sections: one file without network, services or libraries.

The content security policy forbids all requests, and all scripts but its own, by digest.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
from collections.abc import Sequence
from typing import Any

from surefoot.report.markup import PageSection, embedded_json

READOUT = (
    "Point at a curve: all of them show the same moment. Drag to zoom, double-click to see all."
)


def asset(name: str) -> str:
    """A text file of this package."""
    file = importlib.resources.files("surefoot.report") / "assets" / name
    return file.read_text(encoding="utf-8")


def page(
    title: str, head: str, sections: Sequence[PageSection], curves: dict[str, Any] | None
) -> str:
    """The HTML of a page.

    Args:
        title: of the browser's tab.
        head: what stands above the index.
        curves: of `series.page_data`, for the section with the curves.
    """
    script, style = asset("page.js"), asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    index = "".join(f'<a href="#{s.id}">{html.escape(s.title)}</a>' for s in sections)
    body = "".join(
        f'<section id="{s.id}"><h2>{html.escape(s.title)}</h2>{s.body}</section>' for s in sections
    )
    data = "" if curves is None else embedded_json(curves, "curves-data")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body>"
        f'<header class="top">{head}</header><nav class="index" aria-label="Parts of this page">'
        f"<div>{index}</div></nav><main>{body}</main>"
        f"<footer>Made by Surefoot from the files of the run folder.</footer>"
        f"{data}<script>{script}</script></body></html>\n"
    )


def curves_body(data: dict[str, Any]) -> str:
    """The element in which the script draws."""
    if not data["charts"]:
        return '<p class="soft">No update has been logged yet.</p>'
    return (
        f'<div class="tools"></div><p class="readout">{READOUT}</p><div class="charts"></div>'
        "<noscript><p>The curves are drawn by a script of this page; the numbers are in "
        "<code>metrics.jsonl</code>.</p></noscript>"
    )
