"""Features of the weights' norm and of the learning rate that moved it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.recording import Floats, Recording
from surefoot.diagnosis.robust import RobustSeries


class WeightFeatures:
    """The norm of all weights over the run; None where it was not recorded often enough."""

    def __init__(self, recording: Recording) -> None:
        self._series = recording["weight_norm"].finite
        self._last_step = recording.last_step

    @property
    def norms(self) -> Floats:
        """[N] as recorded."""
        return self._series.values

    @cached_property
    def growth(self) -> float | None:
        """Last norm over the first."""
        norms = self.norms
        return float(norms[-1] / norms[0]) if len(norms) > 1 and norms[0] > 0 else None

    def grew_by_more_than(self, factor: float) -> bool:
        """Whether `growth` is known and above a factor."""
        return self.growth is not None and self.growth > factor

    @cached_property
    def motion(self) -> float | None:
        """Largest relative change of the norm since the first."""
        norms = self.norms
        if len(norms) < 3 or norms[0] <= 0:
            return None
        return float(np.abs(norms / norms[0] - 1).max())

    @cached_property
    def known_from_start(self) -> bool:
        """Whether the first norm is that of weights that had hardly been trained."""
        steps = self._series.steps
        return len(steps) > 0 and bool(steps[0] <= max(5, 0.02 * self._last_step))

    @cached_property
    def lasting_early_growth(self) -> float | None:
        """Norm after the first twentieth of the run over the initial norm; None unless it is at
        least 2 and the norm stays there."""
        norms = self._series
        if len(norms) < 5 or norms.values[0] <= 0 or not self.known_from_start:
            return None
        early = np.interp(limits.EARLY_SHARE_OF_RUN * self._last_step, norms.steps, norms.values)
        stays = norms.values[-1] < limits.MAX_LATER_WEIGHT_GROWTH * early
        growth = float(early) / float(norms.values[0])
        return growth if early > 2 * norms.values[0] and stays else None


class ScheduleFeatures:
    """The learning rate over the run; None where it was not recorded."""

    def __init__(self, rate: RobustSeries) -> None:
        self._rate = rate

    @cached_property
    def starts_at_peak(self) -> bool | None:
        """Whether the first rate is at least half of the highest of the first rows."""
        rate = self._rate
        if len(rate) < 2:
            return None
        return bool(rate.values[0] >= 0.5 * rate.values[: max(20, len(rate) // 10)].max())

    @cached_property
    def is_kept(self) -> bool | None:
        """Whether the rate over the last tenth is still a third of its peak."""
        if len(self._rate) < 2:
            return None
        return bool(np.median(self._rate.part(0.9, 1)) > 0.33 * self._rate.values.max())

    @cached_property
    def sum(self) -> float | None:
        """Sum of the rates of all updates: no weight of an adaptive optimizer moves further."""
        if not len(self._rate):
            return None
        return float(self._rate.values.mean() * max(1.0, float(self._rate.series.steps[-1])))

    def sum_is_below(self, bound: float) -> bool:
        """Whether `sum` is known and below a bound."""
        return self.sum is not None and self.sum < bound
