"""What all verbs share: JSON that is strict, and text that is printed as it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from surefoot.cli.session import Session, cells, plain, table


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Point:
    x: float
    where: Path


def test_plain_values_are_strict_json() -> None:
    facts = {
        "nan": float("nan"),
        "up": float("inf"),
        "down": float("-inf"),
        "point": Point(1.5, Path("a/b")),
        "colour": Colour.RED,
        "many": ({1}, (2,), [None, True]),
        3: "key",
    }
    assert json.loads(json.dumps(plain(facts), allow_nan=False)) == {
        "nan": "NaN",
        "up": "Infinity",
        "down": "-Infinity",
        "point": {"x": 1.5, "where": "a/b"},
        "colour": "red",
        "many": [[1], [2], [None, True]],
        "3": "key",
    }


def test_nothing_is_written_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    Session().answer({"a": 1})
    assert capsys.readouterr().out == ""


def test_json_goes_to_a_file(tmp_path: Path) -> None:
    target = tmp_path / "answer.json"
    Session(json_target=str(target)).answer({"loss": float("nan")})
    assert json.loads(target.read_text(encoding="utf-8")) == {"loss": "NaN"}


def test_with_json_on_standard_output_people_read_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Session(json_target="-")
    session.say("for people")
    session.answer({"a": 1})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": 1}
    assert captured.err == "for people\n"


def test_brackets_and_long_lines_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()
    line = "[bold]" + "x" * 500 + "[/nonsense]"
    session.say(line)
    assert capsys.readouterr().out == line + "\n"


def test_a_table_keeps_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    shown = table("name")
    shown.add_row(*cells("[red]w[0]"))
    Session().console.print(shown)
    assert "[red]w[0]" in capsys.readouterr().out


def test_next_steps_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    Session().next(("a", "one"), ("longer", "two"))
    assert capsys.readouterr().out.splitlines()[2:] == ["  a        one", "  longer   two"]
