"""Features of the validation loss: how it moves, and how it follows the training loss."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.log_features.loss import StartFeatures
from surefoot.diagnosis.recording import Floats, Recording
from surefoot.diagnosis.robust import RobustSeries, linearity, median_curvature, ranks


class EvaluationFeatures:
    """The loss of the set that was evaluated most. It has the same samples each time, so what moves
    it is the weights."""

    def __init__(
        self, recording: Recording, loss: RobustSeries, start: StartFeatures, rate: RobustSeries
    ) -> None:
        self.set_name, series = recording.validation
        self.losses = RobustSeries(series)
        self._epochs = recording["epoch"].finite
        self._loss, self._start, self._rate = loss, start, rate

    @property
    def last(self) -> float | None:
        """Validation loss of the last evaluation."""
        return float(self.losses.values[-1]) if len(self.losses) else None

    @cached_property
    def trend(self) -> float:
        """Rank correlation of the evaluations with their order, -1 to 1."""
        return linearity(ranks(self.losses.values))

    @cached_property
    def curvature_of_gain(self) -> float:
        """Median second difference (half of it) of the evaluations after the first 40 %, over all
        that the training loss came down; 0 for fewer than four."""
        values = self._later
        if len(values) < 4:
            return 0.0
        return median_curvature(values) / max(abs(self._start.loss - self._loss.end), 1e-30)

    @cached_property
    def curvature_of_level(self) -> float:
        """The same over their own level; 0 for fewer than three."""
        values = self._later
        if len(values) < 3:
            return 0.0
        return median_curvature(values) / max(abs(float(np.median(values))), 1e-30)

    @property
    def are_steady(self) -> bool:
        """Whether there are enough evaluations, and they hardly go up and down."""
        return len(self.losses) > 4 and self.curvature_of_level < limits.MAX_RELATIVE_CURVATURE

    @cached_property
    def gain_in_second_half(self) -> float:
        """Share of all that the validation loss gained which came after half of the sum of the
        rates (of the steps, where no rate was recorded); NaN for fewer than four evaluations."""
        values, steps = self.losses.values, self.losses.series.steps
        if len(values) < 4:
            return float("nan")
        share = steps / max(float(steps[-1]), 1.0)
        if len(self._rate) > 1:
            total = np.cumsum(self._rate.values)
            share = np.interp(steps, self._rate.series.steps, total / max(float(total[-1]), 1e-30))
        place = int(np.searchsorted(share, 0.5))
        middle = float(np.median(values[max(0, place - 1) : place + 2]))
        end = float(np.median(values[-max(2, len(values) // 5) :]))
        return (middle - end) / max(abs(self._start.loss - end), 1e-30)

    @cached_property
    def followed_until_best(self) -> bool:
        """Whether the validation loss followed the training loss to its best evaluation: by a good
        part of the first loss, unless all samples were still new and most of the way was missing;
        or by a small part, where they had been seen more than three times."""
        values, steps = self.losses.values, self.losses.series.steps
        best = int(values.argmin())
        dip = max(self._start.loss, float(values[0])) - float(values[best])
        train = self._start.loss - self.training_loss_at(float(steps[best]))
        first = abs(self._start.loss)
        share = dip / max(train, 0.1 * abs(self._start.loss - self._loss.lowest), 1e-30)
        seen = self._epochs.values[self._epochs.steps <= steps[best]]
        times = float(seen[-1] - self._epochs.values[0]) if len(seen) else None
        if dip > 0.1 * first:
            return times is None or times > 3 or share > 0.5
        return dip > 0.04 * first and share > 0.1 and times is not None and times > 3

    def training_loss_at(self, step: float) -> float:
        """Level of the training loss at a step: the median of the twentieth of the run before."""
        series = self._loss.series
        values = series.values[series.steps <= step][-max(5, len(series) // 20) :]
        return float(np.median(values)) if len(values) else self._loss.start

    @property
    def _later(self) -> Floats:
        return self.losses.part(0.4, 1) if len(self.losses) else np.empty(0)
