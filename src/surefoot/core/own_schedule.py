"""A user-defined schedule: any function of the updates completed, checked in use.

It is called again for past updates when a run is resumed, so it must be pure: the same number of
updates completed always gives the same multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.core.errors import RequestError
from surefoot.core.schedules import UNDECIDED, Schedule, Undecided
from surefoot.core.targets import bind, name_of, takes

HORIZON = "horizon"
"""Parameter of a user-defined schedule that gets the length of the run, in updates."""


@dataclass(frozen=True)
class OwnSchedule(Schedule):
    """`function(n)`: updates completed to a multiplier of the peak rate.

    Args:
        function: a number, finite and not negative; above 0 at n = 0.
        name: of the function, for messages.

    Raises:
        RequestError: the first update would have a rate of zero.

    >>> OwnSchedule(lambda n: 0.5**n, "halving")(3)
    0.125
    """

    function: Callable[[int], float]
    name: str

    def __post_init__(self) -> None:
        if self(0) == 0:
            raise self._refused(0, "0", "above 0 at the first update, which would do nothing")

    def _multiplier(self, n: int) -> float:
        value = self.function(n)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(n, f"a {type(value).__name__}", "a number, finite and >= 0")
        if not 0 <= value < math.inf:
            raise self._refused(n, str(value), "finite and not negative")
        return float(value)

    def _refused(self, n: int, what: str, rule: str) -> RequestError:
        return RequestError(
            f"the schedule {self.name} gave {what} for update {n}",
            where="schedule",
            rule=f"a multiplier of the peak rate is {rule}",
            remedy="the argument is the number of updates completed, 0 before the first",
        )


def as_schedule(given: Any, name: str = "") -> Schedule:
    """A schedule unchanged, or a function of the updates completed as a schedule.

    Raises:
        RequestError: it is neither, or gives the first update no rate.
    """
    if isinstance(given, Schedule):
        return given
    name = name or name_of(given)
    if isinstance(given, type) or not callable(given):
        raise RequestError(
            f"the schedule is the class {name}"
            if isinstance(given, type)
            else f"the schedule is a {type(given).__name__}",
            where="schedule",
            rule="a schedule is a surefoot.Schedule, or a function n -> multiplier",
            remedy="give an object of it, such as lambda n: 0.999**n",
        )
    return OwnSchedule(given, name)


def schedule_of(
    found: Any, arguments: Mapping[str, Any], horizon: int | Undecided, name: str
) -> Schedule:
    """The schedule that a recipe names: a class is instantiated, a function bound.

    Args:
        found: what was imported.
        arguments: passed by name.
        horizon: passed by this name, too, if the signature has it.

    Raises:
        RequestError: it takes other arguments, or needs a horizon that is not known in updates.
    """
    arguments = dict(arguments)
    if HORIZON not in arguments and takes(found, HORIZON):
        if horizon is UNDECIDED:
            raise RequestError(
                f"{name} takes the horizon, which is not known in updates",
                where="schedule",
                rule="a schedule to the end needs a horizon in steps, tokens, samples or epochs",
                remedy="change train.horizon, or give schedule.arguments.horizon",
            )
        arguments[HORIZON] = horizon
    return as_schedule(bind(found, 1, arguments, name, "schedule"), name)
