"""References: what they stand for, what is refused, and how far they may grow."""

from __future__ import annotations

from typing import Any

import pytest

from config.recipes_for_tests import GPT, changed
from surefoot.config import resolve_recipe
from surefoot.config.references import MAX_CHAIN, MAX_CHARACTERS, MAX_VALUES, follow_references
from surefoot.core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "followed"),
    [
        ({"a": 1, "b": "${a}"}, {"a": 1, "b": 1}),
        ({"a": 1, "b": "x${a}y${a}"}, {"a": 1, "b": "x1y1"}),
        ({"a": None, "b": "${a}", "c": "v${a}"}, {"a": None, "b": None, "c": "vNone"}),
        ({"a": True, "b": "v${a}"}, {"a": True, "b": "vTrue"}),
        ({"a": 1e-9, "b": "${a}s"}, {"a": 1e-9, "b": "1e-09s"}),
        ({"a": "$${b}", "b": 1}, {"a": "$1", "b": 1}),
        ({"a": "é'${b}'", "b": "ü"}, {"a": "é'ü'", "b": "ü"}),
        (
            {"a": [1, (2, 3)], "b": "${a.1}", "c": "${a.1.0}"},
            {"a": [1, (2, 3)], "b": (2, 3), "c": 2},
        ),
        (
            {"a": {"x": 1}, "b": "${a}", "c": "v${a}"},
            {"a": {"x": 1}, "b": {"x": 1}, "c": "v{'x': 1}"},
        ),
        (
            {"a": "${b.c}", "b": "${e}", "e": {"c": "${f}"}, "f": 9},
            {"a": 9, "b": {"c": 9}, "e": {"c": 9}, "f": 9},
        ),
        ({"a": {"b.c": "${d}"}, "d": 3}, {"a": {"b.c": 3}, "d": 3}),
        ({"a": [{"b": "${c}"}], "c": 3}, {"a": [{"b": 3}], "c": 3}),
    ],
)
def test_what_a_reference_stands_for(given: dict[str, Any], followed: dict[str, Any]) -> None:
    before = repr(given)
    assert follow_references(given) == (followed, [])
    assert repr(given) == before


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        ({"a": "${x}"}, ["a"]),
        ({"a": "${a}"}, ["a"]),
        ({"a": ["${a.0}"]}, ["a.0"]),
        ({"a": "${b}", "b": "${a}"}, ["a", "b"]),
        ({"a": {"b": 1, "c": "${a}"}}, ["a.c"]),
        ({"a": "${b.x}", "b": 3}, ["a"]),
        ({"a": "${b.9}", "b": [3]}, ["a"]),
        ({"a": "${b.x}", "b": [3]}, ["a"]),
        ({"a": "${s}", "s": {"x": "${no}"}}, ["a", "s.x"]),
    ],
)
def test_what_leads_nowhere(given: dict[str, Any], paths: list[str]) -> None:
    _, found = follow_references(given)
    assert [violation.path for violation in found] == paths
    assert all("not given, or to itself" in violation.rule for violation in found)


def test_what_is_not_allowed_is_named_where_it_stands() -> None:
    _, found = follow_references({"a": "${b}", "b": "${oc.env:HOME}"})
    first, second = (violation.rule for violation in found)
    assert "refers to a key that is not given" in first
    assert "only ${section.key} is allowed" in second


def tenfold(first: Any, repeated: Any) -> dict[str, Any]:
    """Each key refers ten times to the one before."""
    return {"a0": first, **{f"a{n}": repeated(f"${{a{n - 1}}}") for n in range(1, 12)}}


BOMBS = {
    "text": tenfold("x" * 10, lambda reference: reference * 10),
    "nothing": tenfold("", lambda reference: reference * 10),
    "lists": tenfold(1, lambda reference: [reference] * 10),
    "mappings": tenfold(1, lambda reference: {str(n): reference for n in range(10)}),
    "one long text": {"a": "x" * 100_000, "b": "${a}" * 100_000},
    "a long chain": {f"a{n}": f"${{a{n + 1}}}" for n in range(2000)} | {"a2000": 1},
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_what_grows_without_end_is_refused(bomb: dict[str, Any]) -> None:
    followed, found = follow_references(bomb)
    assert any("leads to too much" in violation.rule for violation in found)
    assert len(repr(followed)) < 10 * MAX_CHARACTERS


def test_what_stays_below_the_limits_is_followed() -> None:
    chain = {f"a{n}": f"${{a{n + 1}}}" for n in range(MAX_CHAIN)} | {f"a{MAX_CHAIN}": 1}
    assert follow_references(chain)[0]["a0"] == 1
    many = {"a": list(range(MAX_VALUES - 1)), "b": "${a}"}
    assert follow_references(many)[1] == []
    many["a"].append(0)
    assert len(follow_references(many)[1]) == 1


def test_a_recipe_that_grows_without_end_is_an_error() -> None:
    arguments = tenfold("x" * 10, lambda reference: reference.replace("a", "task.arguments.a") * 10)
    task = {"kind": "custom", "target": "a:b", "arguments": arguments}
    with pytest.raises(
        ConfigError, match=r"task.arguments.a6 \(argument\).* at most 100,000 values"
    ):
        resolve_recipe(changed(GPT, {"task": task}))
