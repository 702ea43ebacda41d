"""Converts a schedule section to a schedule in updates. Pure arithmetic.

Builds nothing but schedules: everything else that a recipe names needs torch.
"""

from __future__ import annotations

from surefoot.config.sections.recipe import RunSections
from surefoot.config.sections.schedules import (
    ConstantCooldownSection,
    ConstantSection,
    InverseSqrtSection,
    MultiStepSection,
    OneCycleSection,
    OwnScheduleSection,
    PlateauSection,
    StepDecaySection,
    WarmupCosineSection,
    WarmupLinearSection,
    WarmupStableDecaySection,
)
from surefoot.core.counting import Pace, updates_in, warmup_updates
from surefoot.core.doors import GIVEN, Door, find_part, handed_in, label_of
from surefoot.core.errors import RequestError
from surefoot.core.own_schedule import schedule_of
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
)
from surefoot.core.units import Count


def make_schedule(
    settings: RunSections,
    pace: Pace,
    begun_for: int | None = None,
    given: Schedule | None = None,
) -> Schedule:
    """The schedule of the settings, with every span in updates.

    A plateau's schedule is its warm-up, then constant: its drops depend on evaluations.

    A warm-up or milestone given as a share refers to the horizon that the run began with: a resume
    with another horizon does not change the past. What ends with the run, such as a cooldown,
    refers to the current horizon.

    Args:
        settings: `Settings` or a `Recipe`.
        pace: what one update consumes.
        begun_for: the horizon that the run began with, in updates; default: that of `settings`.
        given: the schedule that was handed in, where the settings say so.

    Raises:
        RequestError: a span cannot be converted to updates, or does not fit the horizon.
    """
    try:
        return _made(settings, pace, begun_for, given)
    except RequestError as error:
        place = error.where
        error.where = f"schedule of kind {settings.schedule.kind!r}" + (
            f": {place}" if place else ""
        )
        raise


def _made(
    settings: RunSections, pace: Pace, begun_for: int | None, given: Schedule | None
) -> Schedule:
    section = settings.schedule
    horizon = updates_in(settings.train.horizon, pace)

    def span(value: Count | float) -> int:
        return warmup_updates(value, pace, horizon if begun_for is None else begun_for)

    def total(value: Count | str) -> int:
        if isinstance(value, Count):
            return span(value)
        return _known(horizon if value == "horizon" or begun_for is None else begun_for)

    match section:
        case ConstantSection() | PlateauSection():
            return Constant(span(section.warmup), section.warmup_start)
        case WarmupCosineSection():
            end, start = total(section.total), section.warmup_start
            return WarmupCosine(span(section.warmup), end, section.floor, start)
        case WarmupLinearSection():
            end, start = total(section.total), section.warmup_start
            return WarmupLinear(span(section.warmup), end, section.floor, start)
        case InverseSqrtSection():
            return InverseSqrt(span(section.warmup), section.warmup_start)
        case StepDecaySection():
            period, warmup = span(section.period), span(section.warmup)
            return StepDecay(period, section.factor, warmup, section.warmup_start)
        case MultiStepSection():
            milestones = tuple(span(milestone) for milestone in section.milestones)
            warmup = span(section.warmup)
            return MultiStep(milestones, section.factor, warmup, section.warmup_start)
        case OneCycleSection():
            end = total(section.total)
            # A share is not rounded, like torch's pct_start.
            rise = section.rise * end if isinstance(section.rise, float) else span(section.rise)
            return OneCycle(
                total=end,
                rise=rise,
                anneal=section.anneal,
                initial_divisor=section.initial_divisor,
                final_divisor=section.final_divisor,
                momentum_low=section.momentum_low,
                momentum_high=section.momentum_high,
                cycle_momentum=section.cycle_momentum,
            )
        case WarmupStableDecaySection():
            begin, length = _cooldown(section, pace, horizon)
            return WarmupStableDecay(
                warmup=span(section.warmup),
                cooldown_start=begin,
                cooldown=length,
                floor=section.floor,
                shape=section.shape,
                warmup_start=section.warmup_start,
            )
        case ConstantCooldownSection():
            begin, length = _cooldown(section, pace, horizon)
            return ConstantCooldown(begin, length, section.floor, section.shape)
        case OwnScheduleSection():
            return _own(section, horizon, given)


def _own(section: OwnScheduleSection, horizon: int | Undecided, given: Schedule | None) -> Schedule:
    if section.kind == GIVEN:
        return handed_in(given, "schedule", section.target)
    found = find_part(Door.SCHEDULES, section, "schedule")
    return schedule_of(found, section.arguments, horizon, label_of(Door.SCHEDULES, section))


def _cooldown(
    section: WarmupStableDecaySection | ConstantCooldownSection,
    pace: Pace,
    horizon: int | Undecided,
) -> tuple[int | Undecided, int]:
    """Start and length; an undecided cooldown has length 1 and never starts."""
    if isinstance(section.cooldown, str):
        return UNDECIDED, 1
    length = warmup_updates(section.cooldown, pace, horizon)
    if isinstance(section.cooldown_start, str):
        return _known(horizon) - length, length
    return warmup_updates(section.cooldown_start, pace, horizon), length


def _known(horizon: int | Undecided) -> int:
    if isinstance(horizon, Undecided):
        raise RequestError(
            "the number of updates of the run is unknown",
            rule="a decay to the end needs a horizon in steps, tokens, samples or epochs",
            remedy="change train.horizon, or set the end of the decay in the schedule section",
        )
    return horizon
