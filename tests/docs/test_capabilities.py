"""Every row of docs/capabilities.md names code and tests that are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "surefoot"
PAGE = ROOT / "docs" / "capabilities.md"


def rows() -> Iterator[tuple[str, str, str]]:
    """Number, places and proofs of each row."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and re.fullmatch(r"E?\d+(–\d+)?", cells[0]):
            yield cells[0], cells[2], cells[3]


def functions_in(pattern: str) -> set[str]:
    """Names of all functions in the files that a path or a glob stands for."""
    return {
        node.name
        for path in ROOT.glob(pattern if pattern.endswith(".py") else f"{pattern}.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def missing_proofs(proofs: str) -> list[str]:
    """Tests that a cell names and that are not there. `FILE::test_a, test_b; FILE::test_c`."""
    missing = []
    known: set[str] = set()
    for part in filter(None, (part.strip(" `") for part in re.split(r"[,;]", proofs))):
        path, _, name = part.rpartition("::")
        if not path and part.endswith(".py"):
            missing += [] if (ROOT / part).is_file() else [part]
            continue
        if path:
            known = functions_in(path)
        if name.partition("[")[0] not in known:
            missing.append(part)
    return missing


def missing_places(places: str) -> list[str]:
    found = [place.strip(" `") for place in places.split(",")]
    return [p for p in found if not (SOURCE / p).exists() and not (ROOT / p).exists()]


def test_every_place_and_every_proof_is_there() -> None:
    broken = [
        (number, what)
        for number, places, proofs in rows()
        for what in [*missing_places(places), *missing_proofs(proofs)]
    ]
    assert broken == []


def test_no_row_is_without_a_proof() -> None:
    found = list(rows())
    assert found
    assert [number for number, _, proofs in found if not proofs] == []


def test_the_check_sees_what_is_missing() -> None:
    here = "tests/docs/test_capabilities.py"
    assert missing_proofs(f"{here}::test_no_row_is_without_a_proof, test_none") == ["test_none"]
    assert missing_proofs("tests/nowhere.py::test_none") == ["tests/nowhere.py::test_none"]
    assert missing_proofs("benchmarks/nowhere.py") == ["benchmarks/nowhere.py"]
    assert missing_places("core/errors.py, core/nowhere.py") == ["core/nowhere.py"]
