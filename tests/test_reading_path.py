"""One plain update can be read in a sitting: few lines, few files, a short way to the optimizer."""

from __future__ import annotations

import ast

import pytest

from reading_path import (
    MAX_FILES,
    MAX_LINES,
    MAX_STACK,
    NOT_NUMERIC,
    RECORD,
    ReadingPath,
    does_nothing,
    trace_update,
)

NUMERIC = {
    "engine/step.py:Update.__call__",
    "engine/passes.py:PlainPass.__call__",
    "engine/passes.py:WindowLosses.add",
    "engine/in_flight.py:UpdatesInFlight.settle",
    "numerics/clipping.py:global_norm",
    "numerics/clipping.py:ClipNorm.__call__",
    "optim/update.py:UpdateOptimizer.set_rate",
    "optim/update.py:UpdateOptimizer.step",
}
"""What no honest count leaves out."""


@pytest.fixture(scope="module")
def path() -> ReadingPath:
    return trace_update()


def test_a_plain_update_is_short(path: ReadingPath) -> None:
    assert {function.place for function in path.counted} >= NUMERIC
    assert path.num_lines <= MAX_LINES, [(f.place, f.num_lines) for f in path.counted]
    assert len(path.files) <= MAX_FILES, path.files


def test_the_way_to_the_optimizer_is_short(path: ReadingPath) -> None:
    assert (path.stack[0], path.stack[-1]) == ("trainer.py", "optim/update.py")
    assert "engine/step.py" in path.stack
    assert len(path.stack) <= MAX_STACK, path.stack


def test_what_is_left_out_is_what_the_script_names(path: ReadingPath) -> None:
    entered = {f.place for functions in path.left_out.values() for f in functions}
    assert RECORD in entered
    for place in NOT_NUMERIC:
        assert any(name.startswith(place) for name in entered), f"{place} is not entered"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(self, x): return None", True),
        ("def f(self, x): return x", True),
        ("def f(self, x):\n  '''Words.'''\n  return nullcontext()", True),
        ("def f(self, x): return x + 1", False),
        ("def f(self, x): return self", False),
        ("def f(self, x):\n  y = x\n  return y", False),
    ],
)
def test_a_function_that_does_nothing_is_told_from_one_that_does(
    source: str, expected: bool
) -> None:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    assert does_nothing(node) is expected
