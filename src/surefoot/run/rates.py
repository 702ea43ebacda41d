"""What a change of the settings does to the learning rate of a run that goes on, in numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.config.building import make_schedule
from surefoot.config.sections import Settings
from surefoot.core.counting import Pace
from surefoot.core.errors import SurefootError
from surefoot.core.schedules import Schedule
from surefoot.core.units import Epochs
from surefoot.observe.run_folder import CHECKPOINTS_NAME, RECORD_NAME
from surefoot.state.checkpoint import list_checkpoints, step_of

CONTINUE = (
    "schedule.total=begun keeps the rates: a decay ends with the horizon that the run began with"
)


@dataclass(frozen=True)
class RateChange:
    """The peak learning rate times its multiplier, around the update that a run goes on with."""

    update: int
    """The first one of the run that goes on, counted from 1."""
    last: float | None
    """Rate of the update before it; None where there is none."""
    unchanged: float
    """Rate that it would have had without the change."""
    now: float

    def __str__(self) -> str:
        before = "" if self.last is None else f" after {self.last:.4g} in update {self.update - 1}"
        ratio = ""
        if self.last and self.now:
            factor = self.now / self.last
            ratio = f", {factor:.4g} times" if factor >= 1 else f", {1 / factor:.4g} times less"
        return (
            f"update {self.update} has the learning rate {self.now:.4g}{before}{ratio}; without "
            f"the change it would be {self.unchanged:.4g}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rate_change(
    step: int, before: tuple[Settings, Schedule], now: tuple[Settings, Schedule]
) -> RateChange | None:
    """The change at the update after `step`; None where its rate is what it would have been."""
    old_rate, new_rate = _peak(before[0]), _peak(now[0])
    unchanged, changed = old_rate * before[1](step), new_rate * now[1](step)
    if math.isclose(unchanged, changed, rel_tol=1e-9):
        return None
    last = old_rate * before[1](step - 1) if step else None
    return RateChange(step + 1, last, unchanged, changed)


def expected_change(run: Path, before: Settings, now: Settings) -> RateChange | None:
    """The same before anything is built, from what the run has recorded of its updates.

    None where the rate stays, or where the record does not say how long an epoch is.
    """
    try:
        step = step_of(list_checkpoints(run / CHECKPOINTS_NAME)[-1])
        extra = json.loads((run / RECORD_NAME).read_text("utf-8"))["extra"]
        pace = _recorded_pace(extra, before)
        begun = int(extra["horizon_updates"])
        schedules = (make_schedule(settings, pace, begun) for settings in (before, now))
        return rate_change(step, (before, next(schedules)), (now, next(schedules)))
    except (SurefootError, OSError, LookupError, TypeError, ValueError):
        return None


def _recorded_pace(extra: dict[str, Any], before: Settings) -> Pace:
    samples, horizon = int(extra["samples_per_update"]), before.train.horizon
    num_samples = None
    if isinstance(horizon, Epochs):
        num_samples = round(int(extra["horizon_updates"]) / horizon.value) * samples
    return Pace(samples, num_samples=num_samples, tokens_per_sample=extra.get("tokens_per_sample"))


def _peak(settings: Settings) -> float:
    return float(getattr(settings.optimizer, "lr", 1.0))
