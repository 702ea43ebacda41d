"""What a run promises: what for, by which metric, within which budget. Judges nothing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from surefoot.config.fields import (
    DurationOrNone,
    NotNegativeNumber,
    NumberOrNone,
    PositiveOrNone,
    Section,
    Text,
)


class BudgetSection(Section):
    """What may be spent. A run that has spent it saves and stops."""

    device_hours: PositiveOrNone = "none"
    """Devices times hours; a run on the CPU holds one device."""
    wall_clock: DurationOrNone = "none"
    cost: PositiveOrNone = "none"
    price_per_device_hour: PositiveOrNone = "none"


class SliceSection(Section):
    """A metric of one validation set that may not get worse than the baseline's."""

    metric: Text
    """As SET/METRIC."""
    direction: Literal["min", "max"]
    allowed_regression: NotNegativeNumber = 0.0
    """How much worse it may be, in units of the metric."""


class ContractOffSection(Section):
    """Nothing is promised, so there is no verdict."""

    kind: Literal["off"] = "off"


class ContractOnSection(Section):
    """A contract; its kind is the kind of result, which says what evidence it demands."""

    kind: Literal["research", "production_candidate", "adapter", "benchmark"]
    task: Text
    """What the model is for, in words."""
    metric: Text = "as-task"
    """The metric that decides, as METRIC of the first validation set or SET/METRIC."""
    direction: Literal["as-task", "min", "max"] = "as-task"
    target: NumberOrNone = "none"
    """What the deciding metric must reach."""
    judged: Literal["last", "best"] = "last"
    """Which evaluation counts: the last one, or that of the best checkpoint that was kept."""
    baseline: Text = "none"
    """The folder of a run that this one is measured against."""
    slices: Annotated[tuple[SliceSection, ...], Field(strict=False)] = ()
    budget: BudgetSection = BudgetSection()
    resume: Literal["T0", "T1", "T2"] = "T2"
    """What every resume must keep at least: T0 every bit, T1 samples and random numbers, T2 also
    over another number of ranks."""


ContractSection = Annotated[ContractOffSection | ContractOnSection, Field(discriminator="kind")]
