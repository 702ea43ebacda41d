"""The contract of a run: purpose, deciding metric and budget. Judges nothing."""

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
    """Limits of cost. A run that reaches one saves and stops."""

    device_hours: PositiveOrNone = "none"
    """Number of devices times hours; a run on the CPU counts as one device."""
    wall_clock: DurationOrNone = "none"
    cost: PositiveOrNone = "none"
    price_per_device_hour: PositiveOrNone = "none"


class SliceSection(Section):
    """A metric of one validation set that must not be worse than the baseline's."""

    metric: Text
    """As SET/METRIC."""
    direction: Literal["min", "max"]
    allowed_regression: NotNegativeNumber = 0.0
    """How much worse it may be, in units of the metric."""


class ContractOffSection(Section):
    """No contract, and no verdict."""

    kind: Literal["off"] = "off"


class ContractOnSection(Section):
    """A contract; its kind is the kind of result, which sets the required evidence."""

    kind: Literal["research", "production_candidate", "adapter", "benchmark"]
    task: Text
    """Purpose of the model, in words."""
    metric: Text = "as-task"
    """The deciding metric: METRIC of the first validation set, or SET/METRIC."""
    direction: Literal["as-task", "min", "max"] = "as-task"
    target: NumberOrNone = "none"
    """Value that the deciding metric must reach."""
    judged: Literal["last", "best"] = "last"
    """Which evaluation counts: the last one, or that of the best checkpoint that was kept."""
    baseline: Text = "none"
    """The folder of the run to compare with."""
    slices: Annotated[tuple[SliceSection, ...], Field(strict=False)] = ()
    budget: BudgetSection = BudgetSection()
    resume: Literal["T0", "T1", "T2", "T3"] = "T2"
    """Least tier of every resume: T0 keeps every bit, T1 samples and random numbers, T2 also with
    another number of ranks, T3 also after an accepted change."""


ContractSection = Annotated[ContractOffSection | ContractOnSection, Field(discriminator="kind")]
