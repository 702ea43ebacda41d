"""The optimizer side: groups, state, what may be skipped, and what is clipped."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import nn

from assembly.parts import INPUTS, TARGETS, material, settings_of
from surefoot.assembly.optimizer_side import make_ledger, make_optimizer_side, may_skip
from surefoot.core.schedules import Constant
from surefoot.numerics.clipping import ClipNorm, NoClip
from surefoot.numerics.loss_scaling import DynamicLossScale, NoLossScale
from surefoot.numerics.precision import choose_precision
from surefoot.optim.ema import NoAverage, WeightEma

CPU = torch.device("cpu")


def side(dtype: str = "fp32", **sections: dict[str, object]):  # type: ignore[no-untyped-def]
    settings = settings_of(precision={"dtype": dtype}, **sections)
    precision = choose_precision(settings.precision.dtype, CPU)
    made = material(nn.Linear(3, 1), validation=(INPUTS, TARGETS))
    return make_optimizer_side(made.model, made.task, settings, Constant(), precision, CPU)


def test_every_parameter_is_in_one_group_with_its_own_rate() -> None:
    groups = [{"pattern": "bias", "lr_multiplier": 2.0}]
    section = settings_of(optimizer={"kind": "sgd", "lr": 0.1, "groups": groups}).optimizer
    ledger = make_ledger(nn.Linear(3, 1), section)
    assert {row.name: row.lr_multiplier for row in ledger.rows} == {"weight": 1.0, "bias": 2.0}


def test_what_the_settings_ask_for_is_made() -> None:
    plain = side()
    assert isinstance(plain.loss_scale, NoLossScale) and isinstance(plain.average, NoAverage)
    asked = side("fp16", ema={"kind": "on", "decay": 0.9}, guard={"non_finite": "skip"})
    assert isinstance(asked.loss_scale, DynamicLossScale) and isinstance(asked.average, WeightEma)


def test_clipping_is_off_or_has_a_norm() -> None:
    off, on = side(train={"clip_norm": "off"}), side(train={"clip_norm": 0.5})
    assert off.clip_norm == inf and isinstance(off.clip, NoClip)
    assert on.clip_norm == 0.5 and isinstance(on.clip, ClipNorm)


@pytest.mark.parametrize(
    ("dtype", "guard", "skips"),
    [
        ("fp32", {}, False),
        ("fp32", {"non_finite": "skip"}, True),
        ("fp32", {"spikes": "skip"}, True),
        ("fp16", {}, True),
    ],
)
def test_what_may_be_left_out(dtype: str, guard: dict[str, object], skips: bool) -> None:
    settings = settings_of(precision={"dtype": dtype}, guard=guard)
    assert may_skip(settings, choose_precision(settings.precision.dtype, CPU)) is skips


def test_the_course_is_the_schedule_times_the_plateau() -> None:
    made = side(schedule={"kind": "plateau", "patience": 1})
    assert made.course(0) == (1.0, None)
    made.plateau.verdict = 0.25
    assert made.course(0) == (0.25, None)
