"""Spikes are told, skipped or rolled back, the same way after a restart, within a budget."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from surefoot.core.errors import SpikeError
from surefoot.core.reports import StepReport
from surefoot.core.spikes import LOSS_RULE, NORM_RULE, SpikeWindow
from surefoot.engine.guard import DecisionKind, Guard
from surefoot.engine.spike_guard import RollBack, SpikeGuard, SpikePolicy, SpikeSettings


def report(window: int, loss: float = 1.0, grad_norm: float = 1.0, **changes: Any) -> StepReport:
    made = StepReport(
        step=window,
        window=window,
        epoch=0,
        samples=4 * window,
        tokens=0,
        loss=loss,
        terms={},
        weight=4.0,
        grad_norm=grad_norm,
        clipped=False,
        applied=math.isfinite(grad_norm),
        lr={"all": 0.1},
        loss_scale=1.0,
        sample_ids=(window, window + 1),
    )
    return made._replace(**changes)


def quiet(guard: Guard, first: int = 1, last: int = 100) -> None:
    """Updates that differ by a few per cent."""
    for window in range(first, last + 1):
        even = 1 + 0.03 * math.sin(window)
        assert guard.judge(report(window, even, even)) is None


def guard_with(policy: SpikePolicy, **settings: int) -> Guard:
    return Guard(spikes=SpikeGuard(SpikeSettings(policy, **settings)))


def test_a_spike_is_an_event_that_says_how_far_it_stands_out() -> None:
    guard = Guard()
    quiet(guard)
    decision = guard.judge(report(101, loss=3.0, grad_norm=50.0))
    assert decision is not None
    event = decision.event()
    assert event.kind == "spike" and event.step == 101
    assert "update 101" in event.message and "x the median" in event.message
    assert "loss 3" in event.message and "gradient norm 50" in event.message
    assert event.data["sample_ids"] == [101, 102] and event.data["applied"] is True
    limits = event.data["limits"]
    assert isinstance(limits, dict) and 1.25 < limits["loss"] < 3 and 4 < limits["grad_norm"] < 50
    assert decision.roll_back is None


def test_one_signal_alone_is_enough_and_the_window_stays_clean() -> None:
    guard = Guard()
    quiet(guard)
    for window, loss, norm in ((101, 3.0, 1.0), (103, 1.0, 50.0), (105, 3.0, 50.0)):
        decision = guard.judge(report(window, loss, norm))
        assert decision is not None and decision.kind is DecisionKind.SPIKE
        quiet(guard, window + 1, window + 1)


def test_the_statistics_are_part_of_the_state() -> None:
    guard = Guard()
    quiet(guard)
    resumed = Guard()
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict(), allow_nan=False)))
    assert resumed.judge(report(101, loss=3.0)) == guard.judge(report(101, loss=3.0)) is not None
    assert resumed.state_dict() == guard.state_dict()


def test_a_non_finite_update_is_passed_over() -> None:
    guard = Guard(dynamic_loss_scale=True)
    quiet(guard)
    decision = guard.judge(report(101, 1.0, math.inf, loss_scale=8.0))
    assert decision is not None and decision.kind is DecisionKind.OVERFLOW
    quiet(guard, 102, 140)
    assert guard.judge(report(141, loss=3.0)) is not None


def test_only_skipping_sets_a_limit() -> None:
    for policy in SpikePolicy:
        guard = guard_with(policy)
        assert guard.spikes.norm_limit(in_flight=True) == math.inf
        quiet(guard)
        limit = guard.spikes.norm_limit(in_flight=True)
        assert (4 < limit < 6) if policy is SpikePolicy.SKIP else limit == math.inf


def test_a_skipped_spike_costs_budget_and_the_next_one_stops() -> None:
    guard = guard_with(SpikePolicy.SKIP, budget=1)
    quiet(guard)
    decision = guard.judge(report(101, 1.0, 50.0, applied=False, step=100))
    assert decision is not None and decision.kind is DecisionKind.SPIKE
    assert "update 101" in decision.message and "not applied, 0 more" in decision.message
    # A spike of the loss alone was applied: it is told, and costs nothing.
    assert guard.judge(report(102, loss=3.0)) is not None
    with pytest.raises(SpikeError) as caught:
        guard.judge(report(103, 1.0, 50.0, applied=False))
    assert "budget of 1 is spent" in caught.value.rule


def test_a_roll_back_says_how_far_and_what_is_left_out() -> None:
    guard = guard_with(SpikePolicy.ROLL_BACK, num_rolled_back=10, num_left_out=15)
    quiet(guard)
    decision = guard.judge(report(101, loss=3.0, step=99))
    assert decision is not None
    back = decision.roll_back
    assert back == RollBack(spike_window=101, last_step=88, last_window=90, num_left_out=15)
    assert list(back.left_out) == list(range(91, 106))
    guard.spikes.roll_backs.append(back)
    resumed = Guard()
    resumed.load_state_dict(guard.state_dict())
    assert [w for w in range(200) if resumed.spikes.is_left_out(w)] == list(back.left_out)
    # A window that is left out is no event, and counts for no statistics.
    assert resumed.judge(report(91, weight=0.0, loss=0.0)) is None
    assert len(resumed.spikes.state_dict()["loss"]["values"]) == 100
    assert resumed.spikes.state_dict()["loss"]["newest"] is None


def test_early_spikes_go_back_to_the_beginning() -> None:
    guard = guard_with(SpikePolicy.ROLL_BACK, num_rolled_back=200)
    quiet(guard)
    decision = guard.judge(report(101, loss=3.0))
    assert decision is not None
    back = decision.roll_back
    assert back is not None and (back.last_step, back.last_window) == (0, 0)


def test_each_signal_is_judged_as_if_it_came_alone() -> None:
    draw = random.Random(4)
    guard, loss, norm = Guard(), SpikeWindow(LOSS_RULE), SpikeWindow(NORM_RULE)
    seen = 0
    for window in range(1, 1500):
        values = [math.exp(draw.gauss(0, 0.1)) * draw.choice([1] * 150 + [0, 30]) for _ in "ln"]
        expected = [loss.judge(values[0]), norm.judge(values[1])]
        decision = guard.judge(report(window, *values))
        assert (decision is not None) == any(expected)
        if decision is not None:
            seen += 1
            assert decision.spike is not None
            assert list(decision.spike.spikes.values()) == [spike for spike in expected if spike]
        if window % 97 == 0:
            state = guard.spikes.state_dict()
            assert (state["loss"], state["grad_norm"]) == (loss.state_dict(), norm.state_dict())
    assert seen > 10
