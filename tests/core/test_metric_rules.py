"""Plateau and early stopping: what they decide, and that their states survive."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import RequestError
from surefoot.core.plateau import Plateau, PlateauState
from surefoot.core.stopping import EarlyStopping, StoppingState, is_improvement

metrics = st.lists(
    st.one_of(st.floats(-10, 10).map(lambda x: round(x, 1)), st.sampled_from([math.nan, math.inf])),
    max_size=30,
)


def decisions(rule: Any, values: list[float]) -> list[Any]:
    state, made = rule.begin(), []
    for value in values:
        state, decision = rule(state, value)
        made.append(decision)
    return made


@pytest.mark.parametrize(
    ("metric", "best", "direction", "min_delta", "expected"),
    [
        (1.0, None, "min", 0.0, True),
        (math.nan, None, "min", 0.0, False),
        (math.inf, None, "max", 0.0, False),
        (-math.inf, 1.0, "min", 0.0, False),
        (0.9, 1.0, "min", 0.0, True),
        (1.0, 1.0, "min", 0.0, False),
        (1.1, 1.0, "min", 0.0, False),
        (1.1, 1.0, "max", 0.0, True),
        (1.0, 1.0, "max", 0.0, False),
        (0.75, 1.0, "min", 0.25, False),
        (0.74, 1.0, "min", 0.25, True),
        (1.25, 1.0, "max", 0.25, False),
        (1.26, 1.0, "max", 0.25, True),
        (math.nan, 1.0, "max", 0.0, False),
    ],
)
def test_improvement(
    metric: float, best: float | None, direction: Any, min_delta: float, expected: bool
) -> None:
    assert is_improvement(metric, best, direction, min_delta) is expected
    if not min_delta:
        assert is_improvement(metric, best, direction) is expected


def test_defaults() -> None:
    assert Plateau("min") == Plateau("min", 0.1, 10, 0.0, 0, 0.0)
    assert EarlyStopping("min", 3) == EarlyStopping("min", 3, 0.0)
    assert decisions(Plateau("min", patience=1, floor=1.0), [1, 1]) == [1.0, 1.0]


def test_plateau_drops_after_patience_bad_evaluations() -> None:
    plateau = Plateau("min", factor=0.5, patience=2)
    assert decisions(plateau, [3, 2, 2, 2, 1, 1, 1, 1, 1]) == [
        *(1, 1, 1),
        *(0.5, 0.5, 0.5),
        *(0.25, 0.25),
        0.125,
    ]


def test_plateau_cools_down_and_has_a_floor() -> None:
    plateau = Plateau("max", factor=0.1, patience=1, cooldown=2, floor=0.05)
    assert decisions(plateau, [5, 5, 5, 5, 5, 5, 5]) == [1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05]


def test_plateau_does_not_count_what_was_not_measured() -> None:
    values = [1, math.nan, math.nan, 1, math.nan, 1]
    assert decisions(Plateau("min", factor=0.5, patience=2), values) == [1, 1, 1, 1, 1, 0.5]


@given(
    metrics.map(lambda values: [value for value in values if math.isfinite(value)]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["min", "max"]),
)
def test_plateau_is_torchs_with_one_less_patience(
    values: list[float], patience: int, cooldown: int, min_delta: float, direction: Any
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode=direction,
        factor=0.5,
        patience=patience - 1,
        threshold=min_delta,
        threshold_mode="abs",
        cooldown=cooldown,
        eps=0.0,
    )
    rates = []
    for value in values:
        theirs.step(value)
        rates.append(optimizer.param_groups[0]["lr"])
    assert decisions(Plateau(direction, 0.5, patience, min_delta, cooldown), values) == rates


def test_early_stopping_stops_with_the_patience_th_bad_evaluation() -> None:
    assert decisions(EarlyStopping("min", 2), [3, 2, 2, 1, 1, 1]) == [False] * 5 + [True]
    assert decisions(EarlyStopping("max", 1), [1, 2, 3, 3]) == [False] * 3 + [True]


def test_early_stopping_asks_for_min_delta() -> None:
    assert decisions(EarlyStopping("min", 2, 0.5), [3, 2.6, 2.5]) == [False, False, True]
    assert decisions(EarlyStopping("min", 2, 0.5), [3, 2.6, 2.4]) == [False, False, False]


def test_early_stopping_does_not_count_what_was_not_measured() -> None:
    assert decisions(EarlyStopping("min", 2), [math.nan] * 4) == [False] * 4
    values = [1, 2, math.nan, math.inf]
    assert decisions(EarlyStopping("min", 2), values) == [False, False, False, True]


@pytest.mark.parametrize(
    ("rule", "read"),
    [
        (Plateau("min", 0.5, 2, 0.0, 1, 0.1), PlateauState.from_json),
        (EarlyStopping("min", 3), StoppingState.from_json),
    ],
    ids=["plateau", "early-stopping"],
)
@given(values=metrics)
def test_a_state_survives_json_at_any_point(rule: Any, read: Any, values: list[float]) -> None:
    state, survivor = rule.begin(), rule.begin()
    for value in values:
        state, decision = rule(state, value)
        survivor = read(json.loads(json.dumps(survivor.as_json(), allow_nan=False)))
        survivor, same = rule(survivor, value)
        assert same == decision
    assert survivor == state


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plateau("min", factor=1.0),
        lambda: Plateau("min", factor=0.0),
        lambda: Plateau("min", patience=0),
        lambda: Plateau("min", min_delta=-1.0),
        lambda: Plateau("min", cooldown=-1),
        lambda: Plateau("min", floor=1.5),
        lambda: EarlyStopping("min", 0),
        lambda: EarlyStopping("min", 1, -0.1),
        lambda: EarlyStopping("min", 1, math.inf),
    ],
)
def test_impossible_rules_are_refused(make: Any) -> None:
    with pytest.raises(RequestError, match="is invalid"):
        make()
