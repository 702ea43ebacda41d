"""Features of the gradient norm, against its own past, the loss and the weights."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.log_features.weights import WeightFeatures
from surefoot.diagnosis.robust import RobustSeries


class GradientFeatures:
    """The global gradient norm of each update."""

    def __init__(self, gradient: RobustSeries, loss: RobustSeries, weights: WeightFeatures) -> None:
        self._gradient, self._loss, self._weights = gradient, loss, weights

    @cached_property
    def spikes_from_start(self) -> bool:
        """Whether the norm spikes in the first tenth of the run and later, from a level that it had
        in the first updates, while no weights have grown: no learning rate caused it."""
        values = self._gradient.values
        if len(values) < 20:
            return False
        factor, first = limits.MIN_GRADIENT_SPIKE, self._gradient.part(0, 0.1)
        usual, early = max(float(np.median(values)), float(np.median(first))), float(first.max())
        often = float((values > factor * usual).mean()) > limits.MIN_SPIKE_SHARE
        often = often and float(self._gradient.part(0.5, 1).max()) > factor * usual
        from_usual = early > factor * usual and float(np.median(values[:3])) > 0.5 * usual
        return often and from_usual and not self._weights.grew_by_more_than(2)

    @cached_property
    def sensitivity(self) -> float | None:
        """Median gradient norm times median weight norm over the median loss: the relative change
        of the loss for a relative change of the weights."""
        if not self._known or not len(self._weights.norms):
            return None
        return self._level * float(np.median(self._weights.norms)) / self._loss_scale

    @cached_property
    def is_tiny(self) -> bool:
        """Whether the gradients are not zero, but next to nothing for such a loss."""
        if not self._known or self._level == 0.0:
            return False
        if self.sensitivity is not None:
            return self.sensitivity < limits.MAX_TINY_SENSITIVITY
        return self._level < limits.MAX_TINY_GRADIENT * self._loss_scale

    @cached_property
    def share_of_zeros(self) -> float | None:
        """Share of the updates whose norm is exactly 0; None for too few of them."""
        values = self._gradient.values
        return float((values == 0.0).mean()) if len(values) >= limits.MIN_ROWS else None

    @property
    def _known(self) -> bool:
        return len(self._gradient) > 0 and len(self._loss) >= limits.MIN_ROWS

    @property
    def median(self) -> float | None:
        """Of all updates; None where it was not recorded."""
        return self._gradient.level(0, 1) if len(self._gradient) else None

    @property
    def _level(self) -> float:
        return float(np.median(self._gradient.values))

    @property
    def _loss_scale(self) -> float:
        return max(abs(float(np.median(self._loss.values))), 1e-30)
