"""Every rule has at least two failing scripts and two near-misses here, all of them different."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

from surefoot.sanitizer.rules import all_rules

LEAST = 2
SLUGS = [rule.info.slug for rule in all_rules()]


def scripts(table: str) -> dict[str, set[str]]:
    """The sources of all tables of that name in this folder, by slug."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"counted_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for slug, source in getattr(module, table, ()):
            found[slug].add("".join(source.split()))
    return found


@pytest.fixture(scope="module")
def tables() -> dict[str, dict[str, set[str]]]:
    return {name: scripts(name) for name in ("BUGS", "CLEAN")}


@pytest.mark.parametrize("table", ["BUGS", "CLEAN"])
@pytest.mark.parametrize("slug", SLUGS)
def test_two_scripts(tables: dict[str, dict[str, set[str]]], slug: str, table: str) -> None:
    assert len(tables[table][slug]) >= LEAST


@pytest.mark.parametrize("table", ["BUGS", "CLEAN"])
def test_no_script_is_of_an_unknown_rule(
    tables: dict[str, dict[str, set[str]]], table: str
) -> None:
    assert set(tables[table]) <= set(SLUGS)
