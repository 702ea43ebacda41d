"""From schedule sections to schedules in updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from config.recipes_for_tests import GPT, changed
from surefoot.config import Settings, resolve_recipe
from surefoot.config.building import make_schedule
from surefoot.config.sections import TrainSection, WarmupLinearSection
from surefoot.core.counting import Pace, updates_in
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
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    first_difference,
)
from surefoot.core.units import Seconds, Steps

# 1000 samples of 63 tokens, 4 an update: 250 updates an epoch, 252 tokens an update.
PACE = Pace(samples_per_update=4, num_samples=1000, tokens_per_sample=63)


@pytest.mark.parametrize(
    ("section", "schedule"),
    [
        ({"kind": "constant"}, Constant()),
        ({"kind": "constant", "warmup": "1 epoch"}, Constant(warmup=250)),
        ({"kind": "warmup_cosine"}, WarmupCosine(warmup=20, total=1000, floor=0.1)),
        (
            {"kind": "warmup_cosine", "warmup": "2521 tokens", "total": "2 epochs", "floor": 0.0},
            WarmupCosine(warmup=11, total=500, floor=0.0),
        ),
        ({"kind": "warmup_linear", "warmup": 7}, WarmupLinear(7, 1000, 0.0)),
        ({"kind": "inverse_sqrt", "warmup": "100 samples"}, InverseSqrt(25)),
        ({"kind": "step_decay", "period": "1 epoch"}, StepDecay(250, 0.1, 0)),
        (
            {"kind": "step_decay", "period": 5, "factor": 0.5, "warmup": 3},
            StepDecay(5, 0.5, 3),
        ),
        ({"kind": "multi_step", "milestones": [0.5, 0.75]}, MultiStep((500, 750), 0.1, 0)),
        (
            {"kind": "multi_step", "milestones": ["1 epoch", "3 epochs"], "factor": 0.2},
            MultiStep((250, 750), 0.2, 0),
        ),
        ({"kind": "one_cycle"}, OneCycle(total=1000, rise=300.0)),
        ({"kind": "one_cycle", "total": 999}, OneCycle(total=999, rise=0.3 * 999)),
        (
            {
                "kind": "one_cycle",
                "rise": 40,
                "anneal": "linear",
                "initial_divisor": 10,
                "final_divisor": 100,
                "cycle_momentum": False,
                "momentum_low": 0.5,
                "momentum_high": 0.6,
            },
            OneCycle(1000, 40, "linear", 10.0, 100.0, 0.5, 0.6, False),
        ),
        ({"kind": "wsd"}, WarmupStableDecay(20, UNDECIDED, 1)),
        (
            {"kind": "wsd", "cooldown": 0.2, "shape": "sqrt", "floor": 0.1},
            WarmupStableDecay(20, 800, 200, 0.1, "sqrt"),
        ),
        (
            {"kind": "wsd", "warmup": 5, "cooldown": 100, "cooldown_start": 600},
            WarmupStableDecay(5, 600, 100),
        ),
        ({"kind": "constant_cooldown"}, ConstantCooldown(UNDECIDED, 1)),
        (
            {"kind": "constant_cooldown", "cooldown": "1 epoch", "shape": "cosine"},
            ConstantCooldown(750, 250, 0.0, "cosine"),
        ),
        ({"kind": "plateau", "warmup": 12}, Constant(12)),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_sections_become_schedules(section: dict[str, Any], schedule: Schedule) -> None:
    recipe = resolve_recipe(changed(GPT, {"schedule": section, "train.horizon": "1000 steps"}))
    assert make_schedule(recipe.recipe, PACE) == schedule
    assert make_schedule(recipe.recipe.settings, PACE) == schedule


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "constant", "warmup": 4},
        {"kind": "warmup_cosine", "warmup": 4},
        {"kind": "warmup_linear", "warmup": 4},
        {"kind": "inverse_sqrt", "warmup": 4},
        {"kind": "step_decay", "period": 9, "warmup": 4},
        {"kind": "multi_step", "milestones": [9], "warmup": 4},
        {"kind": "wsd", "warmup": 4},
        {"kind": "plateau", "warmup": 4},
    ],
    ids=lambda section: section["kind"],
)
def test_where_the_warmup_starts(section: dict[str, Any]) -> None:
    plain = resolve_recipe(changed(GPT, {"schedule": section})).recipe
    raised = resolve_recipe(changed(GPT, {"schedule": {**section, "warmup_start": 0.2}})).recipe
    plain_schedule, raised_schedule = make_schedule(plain, PACE), make_schedule(raised, PACE)
    assert [plain_schedule(n) for n in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [raised_schedule(n) for n in range(4)] == pytest.approx([0.4, 0.6, 0.8, 1.0])


def test_the_horizon_may_have_any_unit() -> None:
    for horizon in ("1000 steps", "4 epochs", "4000 samples", "252000 tokens"):
        recipe = resolve_recipe(changed(GPT, {"train.horizon": horizon})).recipe
        assert make_schedule(recipe, PACE) == WarmupCosine(20, 1000, 0.1)


def test_a_cooldown_decided_on_resume_keeps_the_past() -> None:
    before = resolve_recipe(changed(GPT, {"schedule": {"kind": "wsd", "warmup": 10}}))
    overrides = ["schedule.cooldown=50", 'train.horizon="150 steps"']
    after = resolve_recipe(before.as_dict(), overrides)
    old, new = make_schedule(before.recipe, PACE), make_schedule(after.recipe, PACE)
    assert [old(n) for n in range(101)] == [new(n) for n in range(101)]
    assert new(125) == 0.5
    assert new(150) == 0.0


SHARES: dict[str, dict[str, Any]] = {
    "constant": {"warmup": 0.1},
    "warmup_cosine": {"warmup": 0.1},
    "warmup_linear": {"warmup": 0.1},
    "inverse_sqrt": {"warmup": 0.1},
    "multi_step": {"warmup": 0.1, "milestones": [0.5, 0.7]},
    "wsd": {"warmup": 0.1, "cooldown": 0.2},
    "plateau": {"warmup": 0.1, "metric": "loss"},
}


@pytest.mark.parametrize("kind", SHARES)
def test_another_horizon_does_not_move_what_is_given_as_a_share(kind: str) -> None:
    fields = {"kind": kind, **SHARES[kind]}
    first = resolve_recipe(changed(GPT, {"schedule": fields, "evaluate": {"every": "9 steps"}}))
    length = cast(int, updates_in(first.recipe.train.horizon, PACE))
    longer = resolve_recipe(first.as_dict(), [f'train.horizon="{3 * length} steps"'])
    old = make_schedule(first.recipe, PACE)
    new = make_schedule(longer.recipe, PACE, begun_for=length)
    # A decay that ends with the run ends with the longer one.
    same = length // 10 if kind.startswith("warmup_") else length * 8 // 10
    assert first_difference(old, new, until=same) is None
    assert first_difference(old, make_schedule(longer.recipe, PACE), until=same) is not None
    if kind == "wsd":
        assert (new(3 * length * 8 // 10), new(3 * length)) == (1.0, 0.0)
    if not kind.startswith(("warmup_", "wsd")):
        assert first_difference(old, new, until=3 * length) is None


def test_settings_made_by_hand_are_refused_too() -> None:
    settings = Settings(
        train=TrainSection(horizon=Seconds(60), micro_batch=4),
        schedule=WarmupLinearSection(kind="warmup_linear", warmup=Steps(5)),
    )
    with pytest.raises(RequestError, match="number of updates of the run is unknown"):
        make_schedule(settings, PACE)


@pytest.mark.parametrize(
    ("changes", "pace", "where", "what"),
    [
        (
            {"schedule.warmup": "300k tokens"},
            PACE,
            "schedule of kind 'warmup_cosine': warmup=1191, total=1000",
            "is invalid",
        ),
        (
            {"schedule.warmup": "3 tokens"},
            replace(PACE, tokens_per_sample=None),
            "schedule of kind 'warmup_cosine'",
            "tokens cannot be converted to updates",
        ),
        (
            {"schedule": {"kind": "wsd", "cooldown": "900 steps", "warmup": 0.2}},
            PACE,
            "schedule of kind 'wsd': warmup=200, cooldown_start=100",
            "is invalid",
        ),
        (
            {"train.horizon": "1e15 FLOPs"},
            PACE,
            "schedule of kind 'warmup_cosine'",
            "FLOPs cannot be converted to updates",
        ),
    ],
)
def test_what_does_not_fit_the_data_is_refused(
    changes: dict[str, Any], pace: Pace, where: str, what: str
) -> None:
    recipe = resolve_recipe(changed(GPT, {"train.horizon": "1000 steps", **changes})).recipe
    with pytest.raises(RequestError) as caught:
        make_schedule(recipe, pace)
    assert caught.value.where == where
    assert what in caught.value.what
