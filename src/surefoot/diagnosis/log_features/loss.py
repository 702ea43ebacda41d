"""Features of the training loss: where it began, how far it came, and how fast."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.robust import RobustSeries, linearity, ranks, spread


class StartFeatures:
    """What the loss was before anything was learnt, and how well that is known."""

    def __init__(self, series: RobustSeries) -> None:
        self._series = series

    @cached_property
    def loss(self) -> float:
        """Level of the first rows; the very first value where the weights left it at once."""
        if not len(self._series):
            return float("nan")
        return float(self._series.values[0]) if self.leaves_at_once else self._series.start

    @property
    def scale(self) -> float:
        """Absolute value of the first loss, never zero: what shares of it are taken of."""
        return max(abs(self.loss), 1e-30)

    @cached_property
    def leaves_at_once(self) -> bool:
        """Whether the very first loss is far from the level of the first rows, and from each."""
        series, few = self._series, limits.ROWS_AFTER_THE_FIRST
        if len(series) < 2 or series.series.steps[0] > 1:
            return False
        first = float(series.values[0])
        others = series.values[1 : max(2, min(2 * few, len(series) // 4))]
        rise = float(others[: few // 2].min()) - first
        is_inside = bool(others[:few].min() <= first <= others[:few].max())
        by_chance = is_inside or 0 < rise < 0.5 * spread(others)
        off = abs(first - series.start)
        within_noise = off < 2.5 * series.noise and series.noise < 0.3 * abs(first)
        return off > 0.2 * abs(first) and not (by_chance or within_noise)

    @cached_property
    def standard_error(self) -> float:
        """Of `loss`; 0 for a single first row, of which none is known."""
        if self.leaves_at_once:
            return 0.0
        return self._series.error_of_median(self._series.num_first)

    @cached_property
    def is_vague(self) -> bool:
        """Whether the first rows differ too much to say what the loss began with."""
        return self.standard_error > limits.MAX_FIRST_LOSS_ERROR * abs(self.loss)

    @property
    def is_logged(self) -> bool:
        """Whether the first row of the loss is that of the first update that it could be."""
        steps = self._series.series.steps
        interval = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
        return len(steps) > 0 and float(steps[0]) <= max(1.0, interval)

    @cached_property
    def noise(self) -> float:
        """Noise of the first rows: that of the run, scaled with the level of the loss."""
        level = max(abs(float(np.median(self._series.values))), 1e-30)
        return self._series.noise * min(10.0, max(1.0, abs(self._series.start) / level))


class ProgressFeatures:
    """How far the training loss came from its start."""

    def __init__(self, series: RobustSeries, start: StartFeatures, rate: RobustSeries) -> None:
        self._series, self._start, self._rate = series, start, rate

    @cached_property
    def drop(self) -> float:
        """First minus last level, as a share of the first loss; negative where it rose."""
        return (self._start.loss - self._series.end) / self._start.scale

    @cached_property
    def share_above_first(self) -> float:
        """Share of the rows whose level is above the first loss by more than noise explains."""
        series, start = self._series, self._start
        unsure = 3 * float(np.hypot(start.standard_error, series.error_of_median(series.window)))
        margin = limits.MIN_RISE_ABOVE_FIRST * abs(start.loss)
        margin = max(margin, unsure if start.standard_error else 0.0)
        return float((series.smooth > start.loss + margin).mean())

    @cached_property
    def late_fall(self) -> float:
        """Share of its level by which the mean loss fell from the third quarter to the fourth."""
        third, fourth = (float(self._series.part(a, b).mean()) for a, b in ((0.5, 0.75), (0.75, 1)))
        return (third - fourth) / max(abs(third), 1e-30)

    @cached_property
    def trend(self) -> float:
        """Rank correlation of the loss with its order after the first tenth of the run, -1 to 1."""
        return linearity(ranks(self._series.part(0.1, 1) if len(self._series) else np.empty(0)))

    @property
    def trend_in_standard_errors(self) -> float:
        """`trend` over the standard error that it has for mere noise."""
        return self.trend * float(len(self._series) ** 0.5)

    @cached_property
    def is_flat(self) -> bool:
        """Whether the loss stayed at the level of its start for most of the run."""
        return self._has_shape and abs(self.drop) < limits.MAX_FLAT_DROP and self._never_left

    @cached_property
    def is_flat_within_noise(self) -> bool:
        """`is_flat`, or indistinguishable from it: the level of the first rows is known no better
        than their noise allows, and the loss stands still from there on."""
        if not self._has_shape or not self._never_left:
            return False
        series, start = self._series, self._start
        later = abs(series.level(0.05, 0.3) - series.end)
        stands = later < max(limits.MAX_FLAT_DROP * abs(start.loss), 3 * series.standard_error())
        within = abs(start.loss - series.end) < 2.5 * start.standard_error
        return self.is_flat or (within and stands)

    def per_rate(self, parts: int) -> Floats:
        """[parts] fall of the loss over parts of the run with equal sums of the rates.

        The first twentieth is left out: it holds the transient of random weights.
        """
        series, rate = self._series, self._rate
        total = np.arange(1.0, len(series) + 1)
        if len(rate) == len(series):
            total = np.cumsum(rate.values)
        begin, last = len(series) // 20, len(series) - 1
        places = np.searchsorted(total, np.linspace(total[begin], total[-1], parts + 1))
        places = np.clip(places, begin, last)
        places[0], places[-1] = begin, last
        return -np.diff(series.smooth[places])

    @property
    def _has_shape(self) -> bool:
        return len(self._series) >= limits.MIN_ROWS

    @property
    def _never_left(self) -> bool:
        margin = max(2 * limits.MAX_FLAT_DROP * abs(self._start.loss), 3 * self._series.noise)
        return self._series.lowest > self._start.loss - margin
