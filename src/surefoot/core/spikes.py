"""What counts as a spike of the loss or the gradient norm: a rule, and the window it looks at.

A value is compared with the median and the median absolute deviation (MAD) of the values before it;
a value that was flagged, or is not finite, never enters them, so that one spike cannot hide the
next and a NaN poisons nothing. It decides nothing about the run. No torch, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from struct import pack, unpack
from typing import Any, Final

from surefoot.core.errors import RequestError

DEVIATIONS_PER_MAD: Final = 1.4826
"""Standard deviations in a MAD of normally distributed values."""
STRIDE: Final = 8
"""Updates for which one bound holds."""
SHORT_OF_ROUNDING: Final = 1.0 - 1e-6
"""A factor for bounds: the limit itself is rounded to float32."""
LARGEST_RATIO: Final = 1e9
"""Of quartiles, as far as a bound looks: no power of it is beyond the range of floats."""


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
    """The values of one signal that a spike is told by, in their order and sorted.

    `judge` takes the value of update n and compares it with the statistics through update n-2:
    those that were known when update n was queued. NaN stands for an update that has no value.
    """

    def __init__(self, rule: SpikeRule) -> None:
        self.rule = rule
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._newest: float | None = None
        """Of the update before: it counts from the next one on."""
        self._in_a_row = 0
        # Between two updates caches are cold: values below a bound that holds for a while wait,
        # and enter many at once.
        self._waiting: list[float] = []
        self._low = 0.0

    def judge(self, value: float) -> Spike | None:
        """Takes the value of the next update; returns it as a spike, or None."""
        if 0.0 < value < self._low:
            self._waiting.append(value)
            if len(self._waiting) == STRIDE:
                self._catch_up()
                self._low = self._low_ahead()
            return None
        self._catch_up()
        spike = None
        if not self._is_low(value):
            limit, median = self._limit()
            if limit <= value < math.inf:
                spike = self._flagged(Spike(value, limit, median))
        if spike is None and math.isfinite(value):
            self._in_a_row = 0
            self._enter(value)
        elif spike is None:
            self._enter(None)
        self._low = self._low_ahead()
        return spike

    def limit(self, *, in_flight: bool) -> float:
        """The limit for the next update that is queued, a number that float32 holds.

        Args:
            in_flight: whether the value of the update before it is still on its way; then all that
                is known counts, else all but the newest: through update n-2 either way.
        """
        self._catch_up()
        window = self
        if in_flight:
            window = SpikeWindow(self.rule)
            window.load_state_dict(self.state_dict())
            window._enter(None)
        return window._limit()[0]

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; never one that is not finite."""
        self._catch_up()
        return {
            "values": list(self._values),
            "newest": self._newest,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` gave; of a longer window the latest values are kept."""
        self._waiting.clear()
        self._low = 0.0
        self._values = deque(map(float, state["values"][-self.rule.num_values :]))
        self._sorted = sorted(self._values)
        newest = state["newest"]
        self._newest = None if newest is None else float(newest)
        self._in_a_row = int(state["in_a_row"])

    def _flagged(self, spike: Spike) -> Spike:
        self._in_a_row += 1
        self._enter(None)
        if self._in_a_row < self.rule.new_level_after:
            return spike
        self._values.clear()
        self._sorted.clear()
        self._in_a_row = 0
        return replace(spike, new_level=True)

    def _enter(self, value: float | None) -> None:
        """The value of the update before counts from now on; the oldest does no longer."""
        if self._newest is not None:
            self._values.append(self._newest)
            insort(self._sorted, self._newest)
            if len(self._values) > self.rule.num_values:
                del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._newest = value

    def _catch_up(self) -> None:
        """Enters the values that wait; `_low` holds no longer."""
        if self._waiting:
            self._in_a_row = 0
        for value in self._waiting:
            self._enter(value)
        self._waiting.clear()
        self._low = 0.0

    def _low_ahead(self) -> float:
        """A bound below the limits of the next `STRIDE` updates, by the reasons of `_is_low`.

        So many values replaced move what stands at a place of the sorted ones by at most as many
        places. 0 for no bound: where the window is not full, or holds a value of zero or below.
        """
        values, rule = self._sorted, self.rule
        middle, quarter = len(values) // 2, len(values) // 4
        if len(values) < rule.num_values or quarter <= STRIDE or values[0] <= 0.0:
            return 0.0
        if self._newest is not None and self._newest <= 0.0:
            return 0.0
        median = values[middle - STRIDE]
        above = values[quarter + middle - STRIDE] / values[middle + STRIDE]
        ratio = min(median / values[quarter + STRIDE], above, LARGEST_RATIO)
        power = rule.num_deviations * DEVIATIONS_PER_MAD
        return SHORT_OF_ROUNDING * rule.least_ratio * median * math.pow(max(1.0, ratio), power)

    def _is_low(self, value: float) -> bool:
        """Whether a value is below the limit for certain; most are, and need no MAD.

        The half of the values within a MAD of the median are neighbours, which reach down to the
        lower quartile or up to the upper one: no MAD is below the distance of the nearer.
        """
        values, rule = self._sorted, self.rule
        if len(values) < rule.min_values:
            return True
        if values[0] <= 0.0:
            return False
        median = values[len(values) // 2]
        bound = SHORT_OF_ROUNDING * rule.least_ratio * median
        if value < bound:
            return True
        quarter = len(values) // 4
        above = values[quarter + len(values) // 2] / median
        ratio = min(median / values[quarter], above, LARGEST_RATIO)
        return value < bound * math.pow(ratio, rule.num_deviations * DEVIATIONS_PER_MAD)

    def _limit(self) -> tuple[float, float]:
        """The limit, and the median that it stands on."""
        values, rule = self._sorted, self.rule
        if len(values) < rule.min_values:
            return math.inf, math.nan
        middle = len(values) // 2
        median = values[middle]
        if values[0] > 0.0:
            logs = [math.log(value / median) for value in values]
            deviation = sorted(map(abs, logs))[middle] * DEVIATIONS_PER_MAD
            ratio = rule.least_ratio * _exp(rule.num_deviations * deviation)
            return _float32(median * ratio), median
        deviation = sorted(abs(value - median) for value in values)[middle] * DEVIATIONS_PER_MAD
        rise = (rule.least_ratio - 1.0) * abs(median) + rule.num_deviations * deviation
        return _float32(median + rise), median


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
