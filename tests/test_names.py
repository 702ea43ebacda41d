"""One name, one class: no class name stands twice in the library, and the check itself can fail."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import surefoot

SOURCE = Path(surefoot.__file__).parent

STILL_OPEN = {"Clip", "_Evaluation", "_Windows"}
"""Names that stand twice until one of the two is renamed. The list only shrinks."""


def doubled_class_names(source: Path) -> dict[str, list[str]]:
    """Class names that more than one place below `source` defines, with `file:line` of each."""
    places = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(source)}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_class_name_stands_twice() -> None:
    doubled = doubled_class_names(SOURCE)
    assert {name: doubled[name] for name in doubled.keys() - STILL_OPEN} == {}


def test_the_list_of_open_names_only_shrinks() -> None:
    assert STILL_OPEN - doubled_class_names(SOURCE).keys() == set()


def test_the_check_sees_a_doubled_name(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Event: ...\n")
    (tmp_path / "two.py").write_text("class Signal: ...\n\ndef f():\n    class Event: ...\n")
    assert doubled_class_names(tmp_path) == {"Event": ["one.py:1", "two.py:4"]}
