"""Schedule sections, in units of a run.

Computes no rate: the formulas are in `surefoot.core.schedules`, and `make_schedule` of
`surefoot.config.building` converts a section to one of them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from surefoot.config.fields import (
    AS_TASK,
    BelowOne,
    CooldownStart,
    Factor,
    NotNegative,
    NotNegativeNumber,
    Period,
    Section,
    Share,
    Span,
    SpanOrUndecided,
    Total,
    WatchedDirection,
    Whole,
)
from surefoot.config.sections.parts import PART_TAG, PartSection, by_kind
from surefoot.core.doors import OURS, Door
from surefoot.core.units import Steps

NO_WARMUP = Steps(0)
CooldownShape = Literal["linear", "cosine", "sqrt"]


class ConstantSection(Section):
    """The peak rate throughout."""

    kind: Literal["constant"]
    warmup: Span = NO_WARMUP
    warmup_start: BelowOne = 0.0


class WarmupCosineSection(Section):
    """Warm-up, then a cosine to the floor. Floor 0.1: GPT-3, arXiv:2005.14165, appendix B."""

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    warmup: Span = 0.02
    warmup_start: BelowOne = 0.0
    total: Total = "horizon"
    floor: Share = 0.1


class WarmupLinearSection(Section):
    """Warm-up, then linear to the floor."""

    kind: Literal["warmup_linear"]
    warmup: Span = 0.02
    warmup_start: BelowOne = 0.0
    total: Total = "horizon"
    floor: Share = 0.0


class InverseSqrtSection(Section):
    """Warm-up, then an inverse square root without end."""

    kind: Literal["inverse_sqrt"]
    warmup: Span
    warmup_start: BelowOne = 0.0


class StepDecaySection(Section):
    """A drop by `factor` after every `period`."""

    kind: Literal["step_decay"]
    period: Period
    factor: Factor = 0.1
    warmup: Span = NO_WARMUP
    warmup_start: BelowOne = 0.0


class MultiStepSection(Section):
    """A drop by `factor` at each milestone."""

    kind: Literal["multi_step"]
    milestones: Annotated[tuple[Span, ...], Field(strict=False, min_length=1)]
    factor: Factor = 0.1
    warmup: Span = NO_WARMUP
    warmup_start: BelowOne = 0.0


class OneCycleSection(Section):
    """Up and down again, with momentum in the opposite direction."""

    kind: Literal["one_cycle"]
    total: Total = "horizon"
    rise: Span = 0.3
    anneal: Literal["cos", "linear"] = "cos"
    initial_divisor: Annotated[float, Field(ge=1)] = 25.0
    final_divisor: Annotated[float, Field(ge=1)] = 1e4
    cycle_momentum: bool = True
    momentum_low: BelowOne = 0.85
    momentum_high: BelowOne = 0.95


class WarmupStableDecaySection(Section):
    """Warm-up, a stable phase, and a cooldown that may be decided when a run is resumed.

    From a checkpoint at step 6000 of an undecided run, a cooldown of 1000 updates starts at once
    with `schedule.cooldown=1000` and `train.horizon="7000 steps"`. The warm-up is unchanged, even
    as a share: it refers to the horizon that the run began with.
    """

    kind: Literal["wsd"]
    warmup: Span = 0.02
    warmup_start: BelowOne = 0.0
    cooldown: SpanOrUndecided = "undecided"
    cooldown_start: CooldownStart = "before-end"
    shape: CooldownShape = "linear"
    floor: Share = 0.0


class ConstantCooldownSection(Section):
    """The peak rate, and a cooldown that may be decided when a run is resumed."""

    kind: Literal["constant_cooldown"]
    cooldown: SpanOrUndecided = "undecided"
    cooldown_start: CooldownStart = "before-end"
    shape: CooldownShape = "linear"
    floor: Share = 0.0


class PlateauSection(Section):
    """A drop by `factor` when a metric of the evaluations has stopped improving."""

    kind: Literal["plateau"]
    metric: Annotated[str, Field(min_length=1)] = AS_TASK
    """As in early_stopping."""
    direction: WatchedDirection = AS_TASK
    factor: Factor = 0.1
    patience: Whole = 10
    """Number of evaluations without improvement until the rate drops."""
    min_delta: NotNegativeNumber = 0.0
    cooldown: NotNegative = 0
    """Number of evaluations after a drop that are ignored."""
    floor: Share = 0.0
    warmup: Span = NO_WARMUP
    warmup_start: BelowOne = 0.0


class OwnScheduleSection(PartSection):
    """A schedule of the user's own or of an installed package: updates completed -> multiplier."""

    door: ClassVar[Door] = Door.SCHEDULES


ScheduleSection = Annotated[
    Annotated[ConstantSection, Tag("constant")]
    | Annotated[WarmupCosineSection, Tag("warmup_cosine")]
    | Annotated[WarmupLinearSection, Tag("warmup_linear")]
    | Annotated[InverseSqrtSection, Tag("inverse_sqrt")]
    | Annotated[StepDecaySection, Tag("step_decay")]
    | Annotated[MultiStepSection, Tag("multi_step")]
    | Annotated[OneCycleSection, Tag("one_cycle")]
    | Annotated[WarmupStableDecaySection, Tag("wsd")]
    | Annotated[ConstantCooldownSection, Tag("constant_cooldown")]
    | Annotated[PlateauSection, Tag("plateau")]
    | Annotated[OwnScheduleSection, Tag(PART_TAG)],
    by_kind(Door.SCHEDULES, *OURS[Door.SCHEDULES]),
]
