"""The map of docs/architecture.md is the tree: each module stands in its room, each path exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from architecture import LEVELS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "surefoot"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MAP, _, REST = PAGE.partition("## The way of a batch")
PATH = re.compile(r"`([\w/.]+(?:\.py|/))`")
PATTERNS = {"sfNNN_slug.py"}
"""Stand for many files."""
MOST_LINES = 200


def rooms() -> Iterator[tuple[list[str], str]]:
    """The rooms of each part of the map, and its text."""
    for part in MAP.split("\n### ")[1:]:
        title, _, text = part.partition("\n")
        yield re.findall(r"`([a-z_]+)/`", title), text


def mentioned() -> set[str]:
    """Modules of the map by path below the package, as their room and folder say it."""
    found = set()
    for names, text in rooms():
        for line in text.splitlines():
            folder = ""
            for path in PATH.findall(line):
                if path.endswith("/"):
                    # What follows lies in that folder of the room, or is the room.
                    folder = "" if path.rstrip("/") in names else path
                    continue
                places = [f"{room}/{folder}{path}" for room in names]
                places += [f"{room}/{path}" for room in names] + [path]
                found |= {place for place in places if (SOURCE / place).is_file()}
    return found


def modules() -> set[str]:
    """Those that the map must hold: all but rules of the audit, which stand in families."""
    return {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if not path.name.startswith("__")
        and not (path.is_relative_to(SOURCE / "sanitizer/rules") and path.name != "base.py")
        and not path.is_relative_to(SOURCE / "sanitizer/matchers")
    }


def is_there(path: str) -> bool:
    """Whether a path is one of the tree, from the root, from the package or below a room."""
    if (ROOT / path).exists() or (SOURCE / path).exists():
        return True
    return any(SOURCE.glob(f"*/{path}")) or any(SOURCE.glob(f"*/*/{path}"))


def test_every_module_stands_on_the_map() -> None:
    assert sorted(modules() - mentioned()) == []


def test_every_path_exists() -> None:
    assert {path for path in PATH.findall(MAP) if not is_there(path)} == PATTERNS
    whole = [p for p in PATH.findall(REST) if not (ROOT / p).exists() and not (SOURCE / p).exists()]
    assert whole == []


def test_the_numbers_of_the_rooms_are_those_of_the_law() -> None:
    titles = [part.partition("\n")[0] for part in MAP.split("\n### ")[1:]]
    said = {}
    for title in titles:
        for room, number in re.findall(r"`([a-z_]+)/` ([0-9]+)", title):
            said[room] = int(number)
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert said == {room: LEVELS[room] for room in folders}


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= MOST_LINES
