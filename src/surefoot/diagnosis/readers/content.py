"""Tells what a log holds from its first lines."""

from __future__ import annotations

import csv
import json
import re
from enum import Enum
from pathlib import Path

from surefoot.diagnosis.recording import as_number

HEAD_BYTES = 1 << 16
PRINTED = re.compile(r"[:=]\s*[-+]?\d|\d:\s|\s\d+\.\d+$")
"""What no column is called, and printed text holds: a name with its value."""


class Content(Enum):
    """What the lines of a log are."""

    JSON_DOCUMENT = "one JSON document"
    JSON_LINES = "one JSON object a line"
    TABLE = "a table with a header"
    TEXT = "printed text"


def content_of(path: Path) -> Content | None:
    """What a file holds; None where it is no text."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if b"\0" in head:
        return None
    lines = [line for line in head.decode("utf-8", errors="replace").splitlines() if line.strip()]
    if not lines:
        return Content.TABLE if path.suffix in (".csv", ".tsv") else Content.JSON_LINES
    if lines[0].lstrip()[0] in "[{":
        return _of_json(path, lines[0], is_one_line=len(lines) == 1)
    return Content.TABLE if _is_table(lines) else Content.TEXT


def _of_json(path: Path, line: str, *, is_one_line: bool) -> Content:
    """Of a file that begins as JSON does."""
    try:
        value = json.loads(line)
    except ValueError:
        # A document over several lines or longer than the head; else a Python mapping, or damage.
        if line.lstrip()[:2] in ("{'", "['"):
            return Content.TEXT
        is_lines = path.suffix in (".jsonl", ".ndjson")
        return Content.JSON_LINES if is_lines else Content.JSON_DOCUMENT
    if isinstance(value, list):
        return Content.JSON_DOCUMENT
    holds_lists = isinstance(value, dict) and any(
        isinstance(inner, (list, dict)) and name != "facts" for name, inner in value.items()
    )
    is_document = is_one_line and holds_lists and path.suffix not in (".jsonl", ".ndjson")
    return Content.JSON_DOCUMENT if is_document else Content.JSON_LINES


def delimiter_of(header: str) -> str:
    """What separates the cells of a header."""
    return max(",;\t", key=header.count)


def _is_table(lines: list[str]) -> bool:
    """Whether the first line names the cells of the next ones."""
    mark = delimiter_of(lines[0])
    names, *rows = csv.reader(lines[:3], delimiter=mark)
    if not all(map(str.strip, names)) or any(PRINTED.search(name) for name in names):
        return False
    if any(as_number(name) is not None for name in names):
        return False
    if not rows:
        return len(names) > 1
    return all(len(row) == len(names) for row in rows[:1]) and (
        len(names) > 1 or as_number(rows[0][0]) is not None
    )
