"""The type of a rule, and helpers. Contains no rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from surefoot.config.fields import AS_TASK
from surefoot.config.sections.schedules import MultiStepSection, ScheduleSection
from surefoot.core.errors import Violation

Rule = Callable[..., Iterator[Violation]]
"""Takes the sections named by its parameters, yields violations."""


def broken(path: str, rule: str, remedy: str = "") -> Violation:
    """A violation whose origin is filled in by the caller."""
    return Violation(path, "", rule, remedy)


def named_metric(metric: str) -> str:
    """A watched metric, for a message; the task's own has no name yet."""
    return "a metric" if metric == AS_TASK else metric


def spans(schedule: ScheduleSection) -> Iterator[tuple[str, Any]]:
    """Path and value of all spans in a schedule section."""
    for name in ("warmup", "total", "period", "rise", "cooldown", "cooldown_start"):
        if hasattr(schedule, name):
            yield f"schedule.{name}", getattr(schedule, name)
    if isinstance(schedule, MultiStepSection):
        for index, milestone in enumerate(schedule.milestones):
            yield f"schedule.milestones.{index}", milestone
