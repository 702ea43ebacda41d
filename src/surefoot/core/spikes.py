"""What counts as a spike of the loss or the gradient norm: a rule, and the window it looks at.

A value is compared with the median and the median absolute deviation (MAD) of the values before it;
a value that was flagged, or is not finite, never enters them, so that one spike cannot hide the
next and a NaN poisons nothing. It decides nothing about the run. No torch, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import truediv
from struct import pack, unpack
from typing import Any, Final

from surefoot.core.errors import RequestError

DEVIATIONS_PER_MAD: Final = 1.4826
"""Standard deviations in a MAD of normally distributed values."""
STRIDE: Final = 24
"""Updates for which a lower bound of the limit is computed at once."""


@dataclass(frozen=True, slots=True)
class SpikeRule:
    """When a value is a spike: `value >= limit`, with the statistics of `num_values` values before.

    Values above zero are compared by their ratios:
    `limit = least_ratio * median * exp(num_deviations * 1.4826 * MAD(log))`. A window that holds a
    value of zero or below is compared by differences:
    `limit = median + (least_ratio - 1) * |median| + num_deviations * 1.4826 * MAD`.

    Raises:
        RequestError: a number that makes no rule.
    """

    least_ratio: float
    """Over the median, however even the values were. Above the spread that is left then lie rare
    batches that differ from all others."""
    num_deviations: float = 5.0
    num_values: int = 128
    min_values: int = 64
    """Nothing is flagged before so many have been seen."""
    new_level_after: int = 32
    """So many spikes in a row are a new level: the window starts anew."""

    def __post_init__(self) -> None:
        if not (self.num_deviations > 0 and self.least_ratio > 1):
            raise RequestError(
                "the spike rule has no limit", rule="num_deviations is above 0, least_ratio above 1"
            )
        if not 2 <= self.min_values <= self.num_values or self.new_level_after < 1:
            raise RequestError(
                f"a window of {self.num_values} values that judges after {self.min_values}",
                rule="2 <= min_values <= num_values, new_level_after >= 1",
            )


LOSS_RULE: Final = SpikeRule(least_ratio=1.25)
NORM_RULE: Final = SpikeRule(least_ratio=4.0)
"""Gradient norms of single batches differ by far more than their losses do."""


@dataclass(frozen=True, slots=True)
class Spike:
    """A value beyond its limit."""

    value: float
    limit: float
    median: float
    """Of the window."""
    new_level: bool = False
    """Whether so many came in a row that the window starts anew behind this one."""


class SpikeWindow:
    """The values of one signal that a spike is told by.

    `judge` takes the value of update n and compares it with the statistics through update n-2:
    those that were known when update n was queued. An update that was not measured, or was not
    finite, is passed over.
    """

    def __init__(self, rule: SpikeRule) -> None:
        self.rule = rule
        self._values: deque[float] = deque(maxlen=rule.num_values)
        self._newest: float | None = None
        """Of the update before: it counts from the next one on."""
        self._in_a_row = 0
        # While `_strides_left` is above 0, the limit is above `_surely_below`: see `_look_ahead`.
        self._surely_below = 0.0
        self._strides_left = 0

    def judge(self, value: float) -> Spike | None:
        """Takes the value of the next update; returns it as a spike, or None."""
        if not self._strides_left:
            self._look_ahead()
        if 0.0 < value <= self._surely_below and self._strides_left:
            self._strides_left -= 1
            if self._newest is not None:
                self._values.append(self._newest)
            self._newest = value
            self._in_a_row = 0
            return None
        return self._judge_exactly(value)

    def calm(self) -> float:
        """No value above 0 and up to this is a spike, for as many updates as `STRIDE`; 0 for none.

        It holds while no value of zero or below comes in between.
        """
        self._look_ahead()
        return self._surely_below if self._strides_left else 0.0

    def take_calm(self, values: Sequence[float]) -> None:
        """Takes values of several updates, oldest first, that are up to `calm`; at least one."""
        if self._newest is not None:
            self._values.append(self._newest)
        self._values.extend(values[:-1])
        self._newest = values[-1]
        self._in_a_row = self._strides_left = 0

    def pass_over(self) -> None:
        """An update without a value that could count."""
        self._enter(None)

    def limit(self, *, in_flight: bool) -> float:
        """The limit for the next update that is queued, a number that float32 holds.

        Args:
            in_flight: whether the value of the update before it is still on its way; then all that
                is known counts, else all but the newest: through update n-2 either way.
        """
        values = self._values
        if in_flight and self._newest is not None:
            values = deque(self._values, self.rule.num_values)
            values.append(self._newest)
        return self._limit(values)[0]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; never one that is not finite."""
        return {
            "values": list(self._values),
            "newest": self._newest,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` gave; of a longer window the latest values are kept."""
        self._values = deque(map(float, state["values"]), self.rule.num_values)
        newest = state["newest"]
        self._newest = None if newest is None else float(newest)
        self._in_a_row = int(state["in_a_row"])
        self._strides_left = 0

    def _judge_exactly(self, value: float) -> Spike | None:
        limit, median = self._limit(self._values)
        if value >= limit and math.isfinite(value):
            self._in_a_row += 1
            new_level = self._in_a_row >= self.rule.new_level_after
            if new_level:
                self._values.clear()
                self._newest, self._in_a_row, self._strides_left = None, 0, 0
            self._enter(None)
            return Spike(value, limit, median, new_level)
        self._enter(value if math.isfinite(value) else None)
        if math.isfinite(value):
            self._in_a_row = 0
        return None

    def _enter(self, value: float | None) -> None:
        if self._newest is not None:
            self._values.append(self._newest)
        self._newest = value
        # A value of zero or below changes the scale.
        is_alike = value is None or value > 0.0
        self._strides_left = max(0, self._strides_left - 1) if is_alike else 0

    def _limit(self, values: Sequence[float]) -> tuple[float, float]:
        """The limit, and the median that it stands on."""
        rule = self.rule
        if len(values) < rule.min_values:
            return math.inf, math.nan
        ordered = sorted(values)
        middle = len(ordered) // 2
        median = ordered[middle]
        if ordered[0] > 0.0:
            logs = [math.log(value / median) for value in ordered]
            deviation = sorted(map(abs, logs))[middle] * DEVIATIONS_PER_MAD
            ratio = rule.least_ratio * _exp(rule.num_deviations * deviation)
            return _float32(median * ratio), median
        deviation = sorted(abs(value - median) for value in ordered)[middle] * DEVIATIONS_PER_MAD
        rise = (rule.least_ratio - 1.0) * abs(median) + rule.num_deviations * deviation
        return _float32(median + rise), median

    def _look_ahead(self) -> None:
        """Bounds the limit of the next `STRIDE` updates from below, so that they cost little.

        When j of m sorted values x are replaced, the median stays at or above x[m/2 - j]. More than
        m/2 of the new values lie within a MAD around the new median, so more than m/2 - j of the
        old ones lie in an interval of twice that length: no MAD is below half the shortest interval
        that holds so many.
        """
        size = self.rule.num_values
        reach = size // 2 - STRIDE
        self._strides_left = 0
        if len(self._values) < size or reach < 1:
            return
        ordered = sorted(self._values)
        if ordered[0] <= 0.0 or (self._newest is not None and self._newest <= 0.0):
            return
        narrowest = min(map(truediv, islice(ordered, reach, None), ordered))
        deviation = DEVIATIONS_PER_MAD * math.log(narrowest) / 2
        rise = self.rule.least_ratio * _exp(self.rule.num_deviations * deviation)
        # A hair below: the bound and the limit are rounded each in its own way.
        self._surely_below = ordered[reach] * rise * (1.0 - 1e-6)
        self._strides_left = STRIDE


def _exp(power: float) -> float:
    """`exp`, infinite beyond the range of floats."""
    return math.exp(power) if power < 700.0 else math.inf


def _float32(value: float) -> float:
    """The nearest float32, so that a device compares with the same number; infinite beyond them."""
    try:
        rounded: float = unpack("f", pack("f", value))[0]
    except OverflowError:
        return math.inf
    return rounded
