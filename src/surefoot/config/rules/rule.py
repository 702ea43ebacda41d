"""What a rule is, and what rules share. Holds no rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from surefoot.config.sections.schedules import MultiStepSection, ScheduleSection
from surefoot.core.errors import Violation

Rule = Callable[..., Iterator[Violation]]
"""Takes the sections that its parameters name, yields what breaks it."""


def broken(path: str, rule: str, remedy: str = "") -> Violation:
    """A violation whose origin the caller of the rules fills in."""
    return Violation(path, "", rule, remedy)


def spans(schedule: ScheduleSection) -> Iterator[tuple[str, Any]]:
    """Path and value of all parts of a run that a schedule names."""
    for name in ("warmup", "total", "period", "rise", "cooldown", "cooldown_start"):
        if hasattr(schedule, name):
            yield f"schedule.{name}", getattr(schedule, name)
    if isinstance(schedule, MultiStepSection):
        for index, milestone in enumerate(schedule.milestones):
            yield f"schedule.milestones.{index}", milestone
