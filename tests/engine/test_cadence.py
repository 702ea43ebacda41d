"""Cadence and horizon are arithmetic on counts."""

from __future__ import annotations

import dataclasses

import pytest

from surefoot.engine.cadence import AtEnd, Every, Horizon, Mark, Unit, frontier

START = Mark(step=0, samples=0, tokens=0, epoch=0, seconds=0.0)


def at(**counts: float) -> Mark:
    return dataclasses.replace(START, **counts)


@pytest.mark.parametrize("unit", list(Unit))
def test_due_at_every_multiple_and_only_there(unit: Unit) -> None:
    every = Every(3, unit)
    due = [n for n in range(1, 10) if every.due(at(**{unit.value: n - 1}), at(**{unit.value: n}))]
    assert due == [3, 6, 9]


def test_a_jump_over_a_multiple_is_due_once() -> None:
    every = Every(1000, Unit.TOKENS)
    assert every.due(at(tokens=900), at(tokens=2100))
    assert not every.due(at(tokens=2100), at(tokens=2900))


def test_a_fraction_of_an_epoch_in_samples() -> None:
    every = Every(0.5 * 7, Unit.SAMPLES)
    due = [n for n in range(1, 8) if every.due(at(samples=n - 1), at(samples=n))]
    assert due == [4, 7]


def test_at_end_is_never_due_on_the_way() -> None:
    assert not AtEnd().due(START, at(step=10**9))


def test_a_horizon_is_reached_from_its_amount_on() -> None:
    horizon = Horizon(5, Unit.STEPS)
    assert [horizon.reached(at(step=n)) for n in (4, 5, 6)] == [False, True, True]


@pytest.mark.parametrize("unit", list(Unit))
def test_nothing_is_due_below_the_frontier_and_something_is_on_it(unit: Unit) -> None:
    rules = (Every(4, unit), Horizon(10, unit), AtEnd(), Every(6, unit))
    for n in range(10):
        next_due = frontier(rules, at(**{unit.value: n}))
        count = next_due.count(unit)
        due = [
            m
            for m in range(n + 1, 14)
            if any(
                rule.due(at(**{unit.value: n}), at(**{unit.value: m}))
                if isinstance(rule, Every)
                else rule.reached(at(**{unit.value: m}))
                for rule in rules
                if not isinstance(rule, AtEnd)
            )
        ]
        assert due[0] == count
        assert all(next_due.count(other) == float("inf") for other in Unit if other is not unit)
