"""Schedules: golden values, shared properties, and parity with torch and transformers."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from surefoot.core.errors import RequestError
from surefoot.core.schedules import (
    UNDECIDED,
    Constant,
    ConstantCooldown,
    InverseSqrt,
    MultiStep,
    OneCycle,
    Schedule,
    StepDecay,
    Undecided,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    first_difference,
)

FAR = 10**9

SCHEDULES: tuple[Schedule, ...] = (
    Constant(),
    Constant(warmup=7),
    Constant(warmup=7, warmup_start=0.5),
    WarmupCosine(warmup=10, total=110, floor=0.1),
    WarmupCosine(warmup=0, total=50, floor=0.0),
    WarmupCosine(warmup=1, total=1, floor=0.2),
    WarmupCosine(warmup=5, total=5, floor=0.2),
    WarmupCosine(warmup=10, total=110, warmup_start=1e-8),
    WarmupLinear(warmup=10, total=110),
    WarmupLinear(warmup=0, total=1, floor=0.3),
    WarmupLinear(warmup=4, total=20, warmup_start=0.25),
    InverseSqrt(warmup=1),
    InverseSqrt(warmup=16),
    InverseSqrt(warmup=16, warmup_start=0.1),
    StepDecay(period=30, factor=0.1),
    StepDecay(period=3, factor=0.5, warmup=7),
    MultiStep(milestones=(30, 60, 80)),
    MultiStep(milestones=(3,), factor=0.5, warmup=7),
    OneCycle(total=100, rise=30),
    OneCycle(total=101, rise=30.3, anneal="linear", initial_divisor=10, final_divisor=100),
    WarmupStableDecay(warmup=5, cooldown_start=50, cooldown=20),
    WarmupStableDecay(warmup=5, cooldown_start=50, cooldown=20, floor=0.1, shape="cosine"),
    WarmupStableDecay(warmup=5, cooldown_start=50, cooldown=20, warmup_start=0.5),
    WarmupStableDecay(warmup=0, cooldown_start=1, cooldown=1, shape="sqrt"),
    WarmupStableDecay(warmup=5, cooldown_start=UNDECIDED, cooldown=20),
    ConstantCooldown(cooldown_start=50, cooldown=20, shape="sqrt"),
    ConstantCooldown(cooldown_start=UNDECIDED, cooldown=20),
)
each = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)


# Shared properties


@each
def test_the_first_update_is_not_wasted(schedule: Schedule) -> None:
    assert schedule(0) > 0


@each
def test_the_last_update_before_the_settled_value_is_not_wasted(schedule: Schedule) -> None:
    end = schedule.settled_at
    if isinstance(end, int) and end > 0:
        assert schedule(end - 1) > 0


@each
def test_a_multiplier_lies_between_zero_and_the_peak(schedule: Schedule) -> None:
    values = [schedule(n) for n in range(300)]
    assert all(0 <= value <= 1 for value in values)


@each
def test_after_the_peak_it_never_rises(schedule: Schedule) -> None:
    values = [schedule(n) for n in range(300)]
    peak = values.index(max(values))
    # A warm-up that runs across a drop is the one exception: it climbs again towards its end.
    start = max(peak, getattr(schedule, "warmup", 0))
    assert all(a >= b for a, b in zip(values[start:], values[start + 1 :], strict=False))


@each
def test_once_settled_it_never_changes(schedule: Schedule) -> None:
    end = schedule.settled_at
    if isinstance(end, Undecided):
        return
    settled = {schedule(n) for n in (end, end + 1, end + 2, 2 * end + 7, FAR)}
    assert len(settled) == 1
    if end > 0:
        assert schedule(end - 1) != schedule(end)


@each
def test_the_floor_is_reached_exactly(schedule: Schedule) -> None:
    if hasattr(schedule, "floor") and isinstance(schedule.settled_at, int):
        assert schedule(schedule.settled_at) == schedule.floor


@each
def test_warmup_climbs_in_equal_steps(schedule: Schedule) -> None:
    if isinstance(schedule, (StepDecay, MultiStep)):
        return
    warmup, start = getattr(schedule, "warmup", 0), getattr(schedule, "warmup_start", 0.0)
    climb = [schedule(n) for n in range(warmup)]
    assert climb == pytest.approx([start + (1 - start) * (n + 1) / warmup for n in range(warmup)])
    if not start:
        assert climb == [(n + 1) / warmup for n in range(warmup)]


@each
def test_a_negative_step_is_refused(schedule: Schedule) -> None:
    with pytest.raises(RequestError, match="update -1"):
        schedule(-1)


@each
def test_a_schedule_is_a_value(schedule: Schedule) -> None:
    same = replace(schedule)  # type: ignore[type-var]
    assert same == schedule
    assert hash(same) == hash(schedule)
    assert [same(n) for n in (3, 1, 3)] == [schedule(n) for n in (3, 1, 3)]
    with pytest.raises(FrozenInstanceError):
        setattr(schedule, (fields(schedule) + fields(Constant()))[0].name, 1)  # type: ignore[arg-type]


@each
def test_torch_takes_it_as_a_lambda(schedule: Schedule) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = lr_scheduler.LambdaLR(optimizer, schedule)
    for n in range(120):
        assert optimizer.param_groups[0]["lr"] == 0.3 * schedule(n)
        optimizer.step()
        scheduler.step()
    other = lr_scheduler.LambdaLR(optimizer, replace(schedule))  # type: ignore[type-var]
    other.load_state_dict(scheduler.state_dict())
    assert other.get_last_lr() == scheduler.get_last_lr()


@given(
    warmup=st.integers(0, 50),
    rest=st.integers(1, 500),
    floor=st.floats(0, 1),
    kind=st.sampled_from([WarmupCosine, WarmupLinear]),
)
def test_any_warmup_and_decay(warmup: int, rest: int, floor: float, kind: Any) -> None:
    schedule = kind(warmup, warmup + rest, floor)
    values = [schedule(n) for n in range(warmup + rest + 3)]
    assert values[0] > 0
    assert max(values) == 1.0 == schedule(warmup)
    assert schedule(warmup + rest) == floor == schedule(FAR)
    falling = values[warmup:]
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert min(falling) >= floor


@given(
    warmup=st.integers(0, 20),
    stable=st.integers(1, 100),
    cooldown=st.integers(1, 100),
    floor=st.floats(0, 1),
    shape=st.sampled_from(["linear", "cosine", "sqrt"]),
)
def test_any_cooldown(warmup: int, stable: int, cooldown: int, floor: float, shape: Any) -> None:
    start = warmup + stable
    schedule = WarmupStableDecay(warmup, start, cooldown, floor, shape)
    undecided = WarmupStableDecay(warmup, UNDECIDED, cooldown, floor, shape)
    assert [schedule(n) for n in range(start + 1)] == [undecided(n) for n in range(start + 1)]
    falling = [schedule(n) for n in range(start, start + cooldown + 3)]
    assert falling[0] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert falling[cooldown:] == [floor] * 3


# Golden values


@pytest.mark.parametrize(
    ("schedule", "golden"),
    [
        (Constant(), {0: 1.0, 5: 1.0, FAR: 1.0}),
        (Constant(warmup=4), {0: 0.25, 2: 0.75, 3: 1.0, 4: 1.0}),
        (Constant(warmup=4, warmup_start=0.2), {0: 0.4, 1: 0.6, 2: 0.8, 3: 1.0, 4: 1.0}),
        (StepDecay(5, 0.5, 2, warmup_start=0.5), {0: 0.75, 1: 1.0, 5: 0.5}),
        (MultiStep((5,), 0.5, 2, warmup_start=0.5), {0: 0.75, 1: 1.0, 5: 0.5}),
        (
            WarmupCosine(warmup=10, total=110, floor=0.1),
            {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 35: 0.8681980515339464, 60: 0.55, 110: 0.1, FAR: 0.1},
        ),
        (WarmupLinear(warmup=10, total=110), {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.5, 109: 0.01, 110: 0}),
        (WarmupLinear(warmup=0, total=4, floor=0.2), {0: 1.0, 1: 0.8, 2: 0.6, 3: 0.4, 4: 0.2}),
        (InverseSqrt(warmup=100), {0: 0.01, 99: 1.0, 100: 1.0, 400: 0.5, 10_000: 0.1}),
        (StepDecay(period=30, factor=0.1), {0: 1, 29: 1, 30: 0.1, 59: 0.1, 60: 0.01, 90: 0.001}),
        (MultiStep((30, 60, 80), 0.5), {29: 1, 30: 0.5, 59: 0.5, 60: 0.25, 80: 0.125, FAR: 0.125}),
        (OneCycle(total=101, rise=51), {0: 0.04, 25: 0.52, 50: 1.0, 75: 0.500002, 100: 4e-6}),
        (
            WarmupStableDecay(warmup=10, cooldown_start=80, cooldown=20, floor=0.1),
            {0: 0.1, 9: 1.0, 79: 1.0, 80: 1.0, 90: 0.55, 99: 0.145, 100: 0.1, FAR: 0.1},
        ),
        (
            WarmupStableDecay(warmup=10, cooldown_start=80, cooldown=20, shape="cosine"),
            {80: 1.0, 85: (1 + math.sqrt(0.5)) / 2, 90: 0.5, 100: 0.0},
        ),
        (
            ConstantCooldown(cooldown_start=84, cooldown=16, shape="sqrt"),
            {0: 1.0, 84: 1.0, 85: 0.75, 88: 0.5, 93: 0.25, 100: 0.0, FAR: 0.0},
        ),
    ],
    ids=repr,
)
def test_golden_values(schedule: Schedule, golden: dict[int, float]) -> None:
    assert {n: schedule(n) for n in golden} == pytest.approx(golden, rel=1e-12, abs=1e-15)


def test_inverse_sqrt_is_continuous_where_the_warmup_ends() -> None:
    schedule = InverseSqrt(warmup=2000)
    assert schedule(1999) == schedule(2000) == 1.0
    assert schedule(8000) == 0.5


def test_a_cooldown_decided_later_keeps_the_past() -> None:
    before = WarmupStableDecay(warmup=10, cooldown_start=UNDECIDED, cooldown=1)
    after = WarmupStableDecay(warmup=10, cooldown_start=600, cooldown=100)
    assert first_difference(before, after, until=600) is None
    assert first_difference(before, after, until=602) == 601
    assert after(650) == 0.5


def test_first_difference_sees_momentum() -> None:
    before = OneCycle(total=100, rise=30)
    assert first_difference(before, replace(before, cycle_momentum=False), until=5) == 0
    assert first_difference(before, replace(before), until=100) is None


# Parity


def torch_rates(
    make: Callable[[torch.optim.Optimizer], Any], peak: float, num_updates: int
) -> tuple[list[float], list[float]]:
    """Rates and momenta that torch's scheduler gives to each update."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=peak, momentum=0.9)
    rates, momenta = [], []
    with warnings.catch_warnings():
        # SequentialLR calls its parts with the deprecated `epoch` argument.
        warnings.filterwarnings("ignore", "The epoch parameter in", UserWarning)
        scheduler = make(optimizer)
        for n in range(num_updates):
            rates.append(optimizer.param_groups[0]["lr"])
            momenta.append(optimizer.param_groups[0]["momentum"])
            optimizer.step()
            if n + 1 < num_updates:
                scheduler.step()
    return rates, momenta


@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize(("total", "share"), [(100, 0.3), (101, 0.3), (37, 0.25), (1000, 0.5)])
def test_one_cycle_is_torchs(anneal: Any, total: int, share: float) -> None:
    # With a peak of 1 torch computes the very same numbers, so they are equal, not close.
    rates, momenta = torch_rates(
        lambda o: lr_scheduler.OneCycleLR(
            o, max_lr=1.0, total_steps=total, pct_start=share, anneal_strategy=anneal
        ),
        peak=1.0,
        num_updates=total,
    )
    schedule = OneCycle(total=total, rise=share * total, anneal=anneal)
    assert [schedule(n) for n in range(total)] == rates
    assert [schedule.momentum(n) for n in range(total)] == momenta


def test_one_cycle_stays_where_torch_raises() -> None:
    schedule = OneCycle(total=100, rise=30)
    assert schedule(99) == schedule(100) == schedule(FAR) == 1 / 25 / 1e4
    assert schedule.momentum(99) == schedule.momentum(FAR) == 0.95
    assert replace(schedule, cycle_momentum=False).momentum(3) is None


@pytest.mark.parametrize("start", [0.0, 1e-8, 0.3])
def test_cosine_is_torchs_sequence_up_to_the_horizon(start: float) -> None:
    warmup, total, floor, peak = 10, 110, 0.1, 0.3
    first = start + (1 - start) / warmup

    def make(optimizer: torch.optim.Optimizer) -> Any:
        rise = lr_scheduler.LinearLR(optimizer, start_factor=first, total_iters=warmup - 1)
        fall = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=floor * peak)
        return lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warmup])

    rates, _ = torch_rates(make, peak, total + 40)
    schedule = WarmupCosine(warmup, total, floor, start)
    ours = [peak * schedule(n) for n in range(total + 40)]
    assert ours[: total + 1] == pytest.approx(rates[: total + 1], rel=1e-12)
    assert rates[total + 39] > 1.5 * rates[total], "torch's rises again"
    assert ours[total:] == [peak * floor] * 40


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (StepDecay(7, 0.3), lambda o: lr_scheduler.StepLR(o, 7, 0.3)),
        (MultiStep((5, 9, 30), 0.3), lambda o: lr_scheduler.MultiStepLR(o, [5, 9, 30], 0.3)),
        (
            WarmupCosine(0, 60, 0.0),
            lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=60, eta_min=0.0),
        ),
        (
            WarmupLinear(0, 60, 0.25),
            lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, total_iters=60),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torchs_single_schedules(schedule: Schedule, make: Any) -> None:
    rates, _ = torch_rates(make, 0.3, 61)
    assert [0.3 * schedule(n) for n in range(61)] == pytest.approx(rates, rel=1e-10, abs=1e-15)


@pytest.fixture(scope="module")
def transformers_optimization() -> Any:
    return pytest.importorskip("transformers.optimization")


def transformers_rates(make: Callable[..., Any], num_updates: int, **arguments: Any) -> list[float]:
    return torch_rates(lambda o: make(o, **arguments), 1.0, num_updates)[0]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("get_cosine_schedule_with_warmup", WarmupCosine(10, 110, 0.0)),
        ("get_linear_schedule_with_warmup", WarmupLinear(10, 110, 0.0)),
    ],
)
def test_transformers_schedules_but_for_the_warmup(
    name: str, schedule: Schedule, transformers_optimization: Any
) -> None:
    rates = transformers_rates(
        getattr(transformers_optimization, name),
        111,
        num_warmup_steps=10,
        num_training_steps=110,
    )
    assert rates[0] == 0.0, "theirs wastes the first update"
    assert [schedule(n) for n in range(9)] == pytest.approx(rates[1:10])
    for n in (10, 11, 35, 60, 109, 110):
        assert schedule(n) == pytest.approx(rates[n], rel=1e-12, abs=1e-15)


def test_transformers_inverse_sqrt_after_the_warmup(transformers_optimization: Any) -> None:
    make = transformers_optimization.get_inverse_sqrt_schedule
    rates = transformers_rates(make, 200, num_warmup_steps=20)
    schedule = InverseSqrt(20)
    assert [schedule(n) for n in range(20, 200)] == pytest.approx(rates[20:], rel=1e-12)


# What can just be, and what cannot


def test_the_smallest_and_flattest_schedules() -> None:
    one_cycle = OneCycle(total=3, rise=2, initial_divisor=2, final_divisor=1)
    assert [one_cycle(n) for n in range(4)] == [0.5, 1.0, 0.5, 0.5]
    flat = OneCycle(total=3, rise=1.5, initial_divisor=1, final_divisor=1, momentum_low=0.95)
    assert {flat(n) for n in range(5)} == {1.0}
    assert {flat.momentum(n) for n in range(5)} == {0.95}
    for schedule in (
        WarmupCosine(0, 1, floor=1.0),
        WarmupLinear(1, 1, floor=1.0),
        ConstantCooldown(1, 1, floor=1.0),
        StepDecay(1, factor=1.0),
        MultiStep((1,), factor=1.0),
        InverseSqrt(1),
    ):
        assert schedule(0) == schedule(1) == 1.0


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Constant(warmup=-1), "warmup=-1"),
        (lambda: Constant(warmup=1, warmup_start=1.0), "warmup_start=1.0"),
        (lambda: StepDecay(3, 0.5, 1, warmup_start=-0.1), "warmup_start=-0.1"),
        (lambda: MultiStep((3,), 0.5, -1), "warmup=-1"),
        (lambda: WarmupStableDecay(-1, 3, 5), "warmup=-1"),
        (lambda: WarmupCosine(warmup=11, total=10), "warmup=11, total=10"),
        (lambda: WarmupCosine(warmup=0, total=0), "total=0"),
        (lambda: WarmupCosine(warmup=0, total=10, floor=1.1), "floor=1.1"),
        (lambda: WarmupLinear(warmup=0, total=10, floor=-0.1), "floor=-0.1"),
        (lambda: WarmupLinear(warmup=0, total=10, floor=float("nan")), "floor=nan"),
        (lambda: InverseSqrt(warmup=0), "warmup=0"),
        (lambda: StepDecay(period=0), "period=0"),
        (lambda: StepDecay(period=1, factor=0.0), "factor=0.0"),
        (lambda: StepDecay(period=1, factor=1.5), "factor=1.5"),
        (lambda: MultiStep(milestones=()), "milestones=()"),
        (lambda: MultiStep(milestones=(5, 5)), "milestones=(5, 5)"),
        (lambda: MultiStep(milestones=(0, 5)), "milestones=(0, 5)"),
        (lambda: OneCycle(total=10, rise=1), "rise=1"),
        (lambda: OneCycle(total=10, rise=10), "rise=10"),
        (lambda: OneCycle(total=10, rise=5, initial_divisor=0.5), "initial_divisor=0.5"),
        (lambda: OneCycle(total=10, rise=5, final_divisor=0.5), "final_divisor=0.5"),
        (lambda: OneCycle(total=10, rise=5, momentum_low=0.99), "momentum_low=0.99"),
        (lambda: OneCycle(total=10, rise=5, momentum_high=1.0), "momentum_high=1.0"),
        (lambda: WarmupStableDecay(10, 9, 5), "cooldown_start=9"),
        (lambda: WarmupStableDecay(0, 0, 5), "cooldown_start=0"),
        (lambda: ConstantCooldown(5, 0), "cooldown=0"),
        (lambda: ConstantCooldown(5, 5, floor=2.0), "floor=2.0"),
    ],
)
def test_impossible_schedules_are_refused(make: Callable[[], Schedule], where: str) -> None:
    with pytest.raises(RequestError) as caught:
        make()
    assert where in caught.value.where
    assert caught.value.rule
