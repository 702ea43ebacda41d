"""Errors: what they say, their exit codes, and that they cross a process border whole."""

from __future__ import annotations

import pickle

import pytest

from surefoot.core import errors
from surefoot.core.errors import ConfigError, DataError, SurefootError, Violation

ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SurefootError)
]


def test_an_error_says_what_where_rule_and_remedy() -> None:
    error = DataError("a label is 12", where="sample 7", rule="labels are 0 to 9", remedy="drop it")
    assert str(error).splitlines() == [
        "a label is 12",
        "  where: sample 7",
        "  rule: labels are 0 to 9",
        "  do: drop it",
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert str(DataError("a label is 12")) == "a label is 12"


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not ConfigError])
def test_an_error_crosses_a_process_border(kind: type[SurefootError]) -> None:
    error = kind("what", where="where", rule="rule", remedy="remedy")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
    assert kind.exit_code in (2, 3, 75)


def test_a_config_error_lists_all_and_crosses_a_process_border() -> None:
    error = ConfigError(
        [
            Violation("optimizer.lr", "a.yaml:3", "must be above 0", "use 3e-4"),
            Violation("", "override", "'x' is no assignment"),
        ]
    )
    text = str(error)
    assert text.splitlines() == [
        "2 problems in the configuration:",
        "  - optimizer.lr (a.yaml:3): must be above 0; use 3e-4",
        "  - (override): 'x' is no assignment",
    ]
    copy = pickle.loads(pickle.dumps(error))
    assert copy.violations == error.violations
    assert str(copy) == text
    assert error.exit_code == 2
    assert str(ConfigError(error.violations[:1])).startswith("1 problem in")
