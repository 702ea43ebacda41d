"""The guard stops, skips within a budget, and tells an fp16 overflow from a real NaN."""

from __future__ import annotations

import math

import pytest

from surefoot.core.errors import NonFiniteError
from surefoot.core.reports import StepReport
from surefoot.engine.guard import DecisionKind, Guard, NonFinitePolicy


def report(
    *, applied: bool = False, loss: float = math.nan, weight: float = 4.0, loss_scale: float = 1.0
) -> StepReport:
    return StepReport(
        step=7,
        window=9,
        epoch=1,
        samples=36,
        tokens=0,
        loss=loss,
        terms={},
        weight=weight,
        grad_norm=1.0 if applied else math.nan,
        clipped=False,
        applied=applied,
        lr={"all": 0.1},
        loss_scale=loss_scale,
        sample_ids=tuple(range(20)),
    )


def test_a_loss_that_is_not_finite_counts_though_its_gradient_was() -> None:
    with pytest.raises(NonFiniteError, match="was finite and has moved the weights"):
        Guard().judge(report(applied=True, loss=math.inf))
    guard = Guard(policy=NonFinitePolicy.SKIP, skip_budget=1)
    decision = guard.judge(report(applied=True, loss=math.nan))
    assert (
        decision is not None
        and decision.kind is DecisionKind.NON_FINITE_LOSS
        and guard.num_skipped == 1
    )


def test_an_applied_update_is_no_event() -> None:
    assert Guard().judge(report(applied=True, loss=1.0)) is None


def test_stop_names_update_samples_and_remedy() -> None:
    with pytest.raises(NonFiniteError) as caught:
        Guard().judge(report())
    error = caught.value
    assert "loss nan" in error.what and "weights are those before" in error.what
    assert "window 9" in error.where and "0, 1, 2" in error.where and "…" in error.where
    assert error.remedy


def test_stop_says_when_the_weights_in_memory_are_spoilt() -> None:
    with pytest.raises(NonFiniteError, match="spoilt; the last checkpoint is whole"):
        Guard(optimizer_skips=False).judge(report())


def test_skip_goes_on_until_its_budget_is_spent_and_records_the_samples() -> None:
    guard = Guard(policy=NonFinitePolicy.SKIP, skip_budget=2)
    decisions = [guard.judge(report()), guard.judge(report())]
    assert [found.kind for found in decisions if found] == [DecisionKind.SKIP] * 2
    assert decisions[0] is not None
    event = decisions[0].event()
    assert (event.kind, event.step) == ("skip", 7)
    assert event.data["sample_ids"] == list(range(20))
    with pytest.raises(NonFiniteError) as caught:
        guard.judge(report())
    assert "budget of 2 is spent" in caught.value.rule


def test_the_budget_survives_a_resume() -> None:
    guard = Guard(policy=NonFinitePolicy.SKIP, skip_budget=1)
    guard.judge(report())
    resumed = Guard(policy=NonFinitePolicy.SKIP, skip_budget=1)
    resumed.load_state_dict(guard.state_dict())
    with pytest.raises(NonFiniteError):
        resumed.judge(report())


def test_a_window_without_weight_is_a_skip_that_costs_no_budget() -> None:
    guard = Guard()
    decision = guard.judge(report(weight=0.0, loss=0.0))
    assert decision is not None and decision.kind is DecisionKind.SKIP and guard.num_skipped == 0


@pytest.mark.parametrize("policy", list(NonFinitePolicy))
def test_an_overflow_under_dynamic_scaling_is_part_of_fp16(policy: NonFinitePolicy) -> None:
    guard = Guard(policy=policy, dynamic_loss_scale=True)
    decision = guard.judge(report(loss=2.0, loss_scale=65536.0))
    assert decision is not None and decision.kind is DecisionKind.OVERFLOW
    assert (guard.num_overflows, guard.num_skipped) == (1, 0)


@pytest.mark.parametrize(
    ("loss", "loss_scale"), [(math.nan, 65536.0), (2.0, 1.0)], ids=["loss is NaN", "scale is 1"]
)
def test_what_no_scale_explains_is_no_overflow(loss: float, loss_scale: float) -> None:
    with pytest.raises(NonFiniteError):
        Guard(dynamic_loss_scale=True).judge(report(loss=loss, loss_scale=loss_scale))
