"""The optimizer side of an update: what moves the weights, at which rate, and what may stop it.

Everything is chosen here from the settings, once. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import nn

from surefoot.assembly.deciding import watched_metric
from surefoot.assembly.given_parts import NOTHING_GIVEN, GivenParts
from surefoot.config.sections import Settings
from surefoot.config.sections.optimizers import OptimizerSection
from surefoot.config.sections.run import TrainSection
from surefoot.config.sections.schedules import PlateauSection
from surefoot.core.doors import GIVEN, Door, find_part, handed_in, label_of
from surefoot.core.plateau import Plateau, PlateauState
from surefoot.core.schedules import Schedule
from surefoot.core.stopping import EarlyStopping, StoppingState
from surefoot.core.targets import bind, takes
from surefoot.engine.decisions import RuleState
from surefoot.engine.guard import Guard, NonFinitePolicy
from surefoot.engine.spike_guard import SpikeGuard, SpikePolicy, SpikeSettings
from surefoot.numerics.clipping import Clip, NoClip
from surefoot.numerics.loss_scaling import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from surefoot.numerics.precision import Precision
from surefoot.optim.ema import NoAverage, WeightEma
from surefoot.optim.ledger import GroupOverride, ParameterLedger
from surefoot.optim.own import MakeOptimizer
from surefoot.optim.registry import build_optimizer
from surefoot.optim.state_on_host import check_state_on_host
from surefoot.optim.update import Course, SkipKind, UpdateOptimizer
from surefoot.tasks.task import Task

MAX_NORM = "max_norm"
"""Parameter of a clip that is given `train.clip_norm`."""


@dataclass(frozen=True)
class OptimizerSide:
    """What an update does with gradients."""

    ledger: ParameterLedger
    optimizer: UpdateOptimizer
    loss_scale: LossScale
    average: WeightEma | NoAverage
    course: Course
    plateau: RuleState
    stopping: RuleState
    guard: Guard
    clip: Clip
    clip_norm: float
    """Gradients with a larger norm count as clipped; infinity where the clip names no norm."""


def make_optimizer_side(
    model: nn.Module,
    task: Task,
    settings: Settings,
    schedule: Schedule,
    precision: Precision,
    device: torch.device,
    given: GivenParts = NOTHING_GIVEN,
    *,
    is_sharded: bool = False,
    elsewhere: Collection[str] = (),
) -> OptimizerSide:
    """Builds it for a model that lies on its device.

    Args:
        schedule: of the learning rate, in updates.
        given: the optimizer and the clip, where they were handed in.
        is_sharded: whether parameters are DTensors.
        elsewhere: names of parameters that lie on other ranks.
    """
    ledger = make_ledger(model, settings.optimizer, elsewhere)
    optimizer = make_optimizer(
        settings, ledger, precision, device, given.optimizer, is_sharded=is_sharded
    )
    loss_scale = make_loss_scale(settings, precision, device)
    plateau, clip = _plateau_state(settings, task), make_clip(settings.train, given.clip)
    return OptimizerSide(
        ledger=ledger,
        optimizer=optimizer,
        loss_scale=loss_scale,
        average=WeightEma(model, settings.ema.decay) if settings.ema.kind == "on" else NoAverage(),
        course=Course(schedule, plateau),
        plateau=plateau,
        stopping=_stopping_state(settings, task),
        guard=make_guard(settings, loss_scale, optimizer),
        clip=clip,
        clip_norm=bound_of(clip),
    )


def may_skip(settings: Settings, precision: Precision) -> bool:
    """Whether the run goes on after an update that is not applied."""
    answers = {settings.guard.non_finite, settings.guard.spikes}
    return precision.needs_loss_scale or "skip" in answers


def make_optimizer(
    settings: Settings,
    ledger: ParameterLedger,
    precision: Precision,
    device: torch.device,
    given: MakeOptimizer | None = None,
    *,
    is_sharded: bool,
) -> UpdateOptimizer:
    """The optimizer that the settings ask for, its state where they want it."""
    section, skipping = settings.optimizer, may_skip(settings, precision)
    optimizer = build_optimizer(
        section, ledger, device, skipping, section.low_precision_weights, given
    )
    if settings.memory.offload_optimizer == "cpu":
        check_state_on_host(device, is_sharded)
        optimizer.keep_state_on_host()
    return optimizer


def make_clip(train: TrainSection, given: Clip | None = None) -> Clip:
    """What is done to gradients; a clip of one's own that takes a `max_norm` gets `clip_norm`.

    Args:
        given: the clip that was handed in, where the settings say so.

    Raises:
        RequestError: the clip cannot be made with its arguments.
    """
    section, is_off = train.clip, train.clip_norm == "off"
    if section.kind == GIVEN:
        return handed_in(given, "clip", section.target)
    if section.kind == "norm" and is_off:
        return NoClip()
    found, name = find_part(Door.CLIPS, section, "train.clip"), label_of(Door.CLIPS, section)
    bound = {MAX_NORM: train.clip_norm} if takes(found, MAX_NORM) and not is_off else {}
    clip: Clip = bind(found, 2, {**bound, **section.arguments}, name, "train.clip")
    return clip


def bound_of(clip: Clip) -> float:
    """The norm from which on an update counts as clipped; infinity for a clip that names none."""
    return float(getattr(clip, MAX_NORM, getattr(clip, "keywords", {}).get(MAX_NORM, inf)))


def make_ledger(
    model: nn.Module, section: OptimizerSection, elsewhere: Collection[str] = ()
) -> ParameterLedger:
    """The parameter groups that an optimizer section asks for.

    Args:
        elsewhere: names of parameters that lie on other ranks.
    """
    overrides = [
        GroupOverride(group.pattern, group.lr_multiplier, _decay_or_rule(group.weight_decay))
        for group in section.groups
    ]
    return ParameterLedger.build(
        model,
        weight_decay=section.weight_decay,
        rule=section.decay_rule,
        decay_embeddings=section.decay_embeddings,
        overrides=overrides,
        elsewhere=elsewhere,
    )


def _decay_or_rule(decay: float | str) -> float | Literal["as-optimizer"]:
    return "as-optimizer" if isinstance(decay, str) else decay


def make_loss_scale(settings: Settings, precision: Precision, device: torch.device) -> LossScale:
    """None where the precision needs none."""
    if not precision.needs_loss_scale:
        return NoLossScale()
    value = settings.precision.loss_scale
    return (
        DynamicLossScale(device=device)
        if value == "dynamic"
        else StaticLossScale(float(value), device)
    )


def make_guard(settings: Settings, loss_scale: LossScale, optimizer: UpdateOptimizer) -> Guard:
    """The guard that the settings ask for."""
    section = settings.guard
    return Guard(
        policy=NonFinitePolicy(section.non_finite),
        skip_budget=section.skip_budget,
        dynamic_loss_scale=isinstance(loss_scale, DynamicLossScale),
        optimizer_skips=optimizer.skips is not SkipKind.NEVER,
        spikes=SpikeGuard(
            SpikeSettings(
                policy=SpikePolicy(section.spikes),
                budget=section.spike_budget,
                num_rolled_back=section.roll_back_updates,
                num_left_out=section.leave_out_windows,
            )
        ),
    )


def _plateau_state(settings: Settings, task: Task) -> RuleState:
    section = settings.schedule
    if not isinstance(section, PlateauSection):
        return RuleState(None, None, 1.0, PlateauState.from_json)
    watched = watched_metric(section, "schedule", settings, task)
    rule = Plateau(
        direction=watched.direction,
        factor=section.factor,
        patience=section.patience,
        min_delta=section.min_delta,
        cooldown=section.cooldown,
        floor=section.floor,
    )
    return RuleState(rule, watched, 1.0, PlateauState.from_json)


def _stopping_state(settings: Settings, task: Task) -> RuleState:
    section = settings.early_stopping
    if section.kind == "off":
        return RuleState(None, None, False, StoppingState.from_json)
    watched = watched_metric(section, "early_stopping", settings, task)
    rule = EarlyStopping(watched.direction, section.patience, section.min_delta)
    return RuleState(rule, watched, False, StoppingState.from_json)
