"""Rules of the schedule: what it needs of the horizon, the optimizer and the evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from surefoot.config.rules.rule import Rule, broken, named_metric, spans
from surefoot.config.sections.optimizers import OptimizerSection, SGDSection
from surefoot.config.sections.run import EvaluateSection, TrainSection
from surefoot.config.sections.schedules import (
    ConstantCooldownSection,
    InverseSqrtSection,
    MultiStepSection,
    OneCycleSection,
    PlateauSection,
    ScheduleSection,
    WarmupCosineSection,
    WarmupLinearSection,
    WarmupStableDecaySection,
)
from surefoot.core.errors import Violation
from surefoot.core.units import Count, Seconds


def decay_to_the_end_needs_a_horizon_in_updates(
    train: TrainSection, schedule: ScheduleSection
) -> Iterator[Violation]:
    """The number of updates in a time is known only afterwards, so no decay can end with it."""
    if not isinstance(train.horizon, Seconds):
        return
    decays = isinstance(
        schedule, WarmupCosineSection | WarmupLinearSection | OneCycleSection
    ) and isinstance(schedule.total, str)
    cools = (
        isinstance(schedule, WarmupStableDecaySection | ConstantCooldownSection)
        and schedule.cooldown != "undecided"
        and schedule.cooldown_start == "before-end"
    )
    if decays:
        yield broken(
            "schedule.total",
            f"{schedule.kind} ends with the run, and train.horizon ({train.horizon}) is a time",
            "give schedule.total or train.horizon in steps, or use schedule.kind=constant",
        )
    if cools:
        yield broken(
            "schedule.cooldown_start",
            f"the cooldown ends with the run, and train.horizon ({train.horizon}) is a time",
            "give schedule.cooldown_start in steps, or train.horizon in steps",
        )


def share_needs_a_horizon_in_updates(
    train: TrainSection, schedule: ScheduleSection
) -> Iterator[Violation]:
    """A share of a time is not a number of updates."""
    if not isinstance(train.horizon, Seconds):
        return
    own_total = isinstance(schedule, OneCycleSection) and isinstance(schedule.total, Count)
    for path, value in spans(schedule):
        if isinstance(value, float) and value and not (own_total and path == "schedule.rise"):
            yield broken(
                path,
                f"{value:g} is a share of train.horizon ({train.horizon}), which is a time",
                f'give {path} in steps, such as "100 steps"',
            )


def warmup_ends_within_the_run(
    train: TrainSection, schedule: ScheduleSection
) -> Iterator[Violation]:
    """A warm-up as long as the run never reaches the peak rate."""
    warmup = getattr(schedule, "warmup", None)
    for path, end in (
        ("schedule.total", getattr(schedule, "total", None)),
        ("train.horizon", train.horizon),
    ):
        if isinstance(warmup, Count) and type(warmup) is type(end) and warmup > end:
            yield broken(
                "schedule.warmup",
                f"the warm-up ({warmup}) is longer than {path} ({end})",
                "shorten the warm-up, or give it as a share such as 0.02",
            )


def inverse_sqrt_needs_a_warmup(schedule: ScheduleSection) -> Iterator[Violation]:
    """The warm-up is the time scale of the decay."""
    if isinstance(schedule, InverseSqrtSection) and not schedule.warmup:
        yield broken(
            "schedule.warmup",
            "inverse_sqrt decays by the length of its warm-up, which is 0",
            'give for example schedule.warmup="2000 steps"',
        )


def milestones_rise(schedule: ScheduleSection) -> Iterator[Violation]:
    """Each milestone comes after the previous one, in the same unit."""
    if not isinstance(schedule, MultiStepSection):
        return
    for index, (before, after) in enumerate(pairwise(schedule.milestones), 1):
        path = f"schedule.milestones.{index}"
        if type(before) is not type(after):
            yield broken(path, f"{before} and {after} have different units", "use one unit")
        elif before >= after:
            yield broken(path, f"{after} does not come after {before}", "sort the milestones")


def cooldown_fits(train: TrainSection, schedule: ScheduleSection) -> Iterator[Violation]:
    """A cooldown has a length, starts after the warm-up and ends with the run."""
    if not isinstance(schedule, WarmupStableDecaySection | ConstantCooldownSection):
        return
    length, start = schedule.cooldown, schedule.cooldown_start
    if isinstance(length, str):
        if not isinstance(start, str):
            yield broken(
                "schedule.cooldown_start",
                f"the cooldown starts at {start}, but its length is undecided",
                'give schedule.cooldown, such as "500 steps" or 0.1',
            )
        return
    if not length:
        yield broken(
            "schedule.cooldown",
            "a cooldown of length 0 has no effect",
            "use schedule.cooldown=undecided, or schedule.kind=constant",
        )
    if type(length) is type(train.horizon) and length > train.horizon:
        yield broken(
            "schedule.cooldown",
            f"the cooldown ({length}) is longer than train.horizon ({train.horizon})",
        )
    warmup = getattr(schedule, "warmup", None)
    if isinstance(warmup, float) and isinstance(length, float) and warmup + length > 1:
        yield broken(
            "schedule.cooldown", f"warm-up ({warmup:g}) and cooldown ({length:g}) are more than 1"
        )


def momentum_is_ordered(schedule: ScheduleSection) -> Iterator[Violation]:
    """One-cycle lowers momentum and raises it again."""
    if isinstance(schedule, OneCycleSection) and schedule.momentum_low > schedule.momentum_high:
        yield broken(
            "schedule.momentum_low",
            f"{schedule.momentum_low} is above schedule.momentum_high, {schedule.momentum_high}",
        )


def cycled_momentum_needs_momentum(
    schedule: ScheduleSection, optimizer: OptimizerSection
) -> Iterator[Violation]:
    """Plain SGD has no momentum buffer for one-cycle to set."""
    if (
        isinstance(schedule, OneCycleSection)
        and schedule.cycle_momentum
        and isinstance(optimizer, SGDSection)
        and not optimizer.momentum
    ):
        yield broken(
            "schedule.cycle_momentum",
            "one_cycle cycles the momentum, and optimizer.momentum is 0",
            "use schedule.cycle_momentum=false, or a momentum such as 0.9",
        )


def plateau_needs_evaluations(
    schedule: ScheduleSection, evaluate: EvaluateSection
) -> Iterator[Violation]:
    """A metric that is measured at the end, or never, cannot lower the rate."""
    if isinstance(schedule, PlateauSection) and evaluate.every in ("end", "never"):
        yield broken(
            "schedule.kind",
            f"plateau watches {named_metric(schedule.metric)}, and evaluate.every is "
            f"{evaluate.every}",
            'use evaluate.every=epoch, or for example "100 steps"',
        )


RULES: tuple[Rule, ...] = (
    decay_to_the_end_needs_a_horizon_in_updates,
    share_needs_a_horizon_in_updates,
    warmup_ends_within_the_run,
    inverse_sqrt_needs_a_warmup,
    milestones_rise,
    cooldown_fits,
    momentum_is_ordered,
    cycled_momentum_needs_momentum,
    plateau_needs_evaluations,
)
