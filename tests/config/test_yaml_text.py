"""Recipe text: words and numbers as a person means them, and nothing that runs or grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.config.yaml_text import MAX_CHARACTERS, read_value, read_yaml, write_yaml
from surefoot.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("no", "no"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("1e-4", 1e-4),
        ("3E4", 3e4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-0.5", -0.5),
        ("10_000", 10_000),
        ("+7", 7),
        ("0", 0),
        ("0.0", 0.0),
        ("010", "010"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        (".inf", float("inf")),
        ("1e", "1e"),
        ("e5", "e5"),
        ("100 steps", "100 steps"),
        ("'8'", "8"),
        ('"off"', "off"),
        ('""', ""),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{a: 1, b: [x, off]}", {"a": 1, "b": ["x", "off"]}),
        ("package.module:Name", "package.module:Name"),
    ],
)
def test_values(text: str, value: Any) -> None:
    read = read_value(text, "override")
    assert read == value
    assert type(read) is type(value)


def test_lines_of_keys() -> None:
    text = """\
# a comment
name: x

model:
  kind: gpt
  sizes:
    - 1
    - 2
data: {kind: text,
  path: a}
"""
    value, lines = read_yaml(text, "a.yaml")
    assert value == {
        "name": "x",
        "model": {"kind": "gpt", "sizes": [1, 2]},
        "data": {"kind": "text", "path": "a"},
    }
    assert lines == {
        "": 2,
        "name": 2,
        "model": 4,
        "model.kind": 5,
        "model.sizes": 6,
        "model.sizes.0": 7,
        "model.sizes.1": 8,
        "data": 9,
        "data.kind": 9,
        "data.path": 10,
    }


def test_an_empty_text_is_an_empty_recipe() -> None:
    assert read_yaml("# nothing\n", "a.yaml") == ({}, {})


HOSTILE = {
    "python object": "a: !!python/object/apply:os.system ['touch PWNED']",
    "python name": "a: !!python/name:os.system",
    "python tag by URI": "a: !<tag:yaml.org,2002:python/object/new:os.system> [x]",
    "own tag": "a: !mine 3",
    "known tag": "a: !!set {x, y}",
    "binary": "a: !!binary aGVsbG8=",
    "forced text": "a: !!str 3",
    "anchor": "a: &x 3\nb: *x",
    "laughs": "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nd: [*c,*c]",
    "loop": "a: &a [*a]",
    "merge": "a: &a {b: 1}\nc:\n  <<: *a",
    "two documents": "a: 1\n---\na: 2",
    "twice": "a: 1\nb: 2\na: 3",
    "twice, deeper": "a:\n  b: 1\n  b: 1",
    "list key": "[1, 2]: 3",
    "empty key": ": 3",
    "list": "- 1\n- 2",
    "scalar": "hello",
    "torn": "a: [1, 2",
    "tab": "a:\n\t- b",
    "control character": "a: \x07",
    "deep": "a: " + "[" * 20_000,
    "deep mappings": "a: " + "{a: " * 5_000,
    "long": "a: " + "x" * MAX_CHARACTERS,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_refused_with_its_place(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "a.yaml")
    (violation,) = caught.value.violations
    assert violation.origin.startswith("a.yaml:")
    assert violation.rule
    assert os.listdir() == []


def test_the_line_of_a_repeated_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\(a.yaml:3\): the key 'a' is there twice \(line 1\)"):
        read_yaml("a: 1\nb: 2\na: 3", "a.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: 1\nb: [1, 2\nc: 3\n", 3), ("a: 1\nb: {x: 1}}\n", 2), ("a: 1\n\tb: 2\n", 2)],
)
def test_the_line_of_a_slip_is_named(text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"\(a.yaml:{line}\): not YAML: .+"):
        read_yaml(text, "a.yaml")


def test_an_anchor_says_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match=r"a.yaml:2.*\$\{section.key\}"):
        read_yaml("b: 1\na: &x 3\n", "a.yaml")


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    words,
    st.sampled_from(["off", "1e-4", "null", "~", "010", "a: b", "# x", "[1", "-", "é", "1 steps"]),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(words.filter(bool), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(words.filter(bool), trees, max_size=4))
def test_what_is_written_is_read_back(tree: dict[str, Any]) -> None:
    origins = dict.fromkeys(tree, "a.yaml:3\nkey: injected # é")
    read, _ = read_yaml(write_yaml(tree, origins), "a.yaml")
    assert read == tree
    assert repr(sorted(read)) == repr(sorted(tree))


def test_origins_stand_beside_their_values() -> None:
    text = write_yaml(
        {"a": {"b": "off", "kind": "x"}, "c": [1, "8"]}, {"a.b": "override", "c": "default"}
    )
    assert text == 'a:\n  kind: x\n  b: off  # override\nc: [1, "8"]  # default\n'
