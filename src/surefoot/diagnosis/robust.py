"""Robust statistics of one series: levels, noise, jumps. Medians and MADs only, no threshold.

It knows nothing of what the numbers mean.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from surefoot.diagnosis.recording import Floats, Series

MAD_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution, times this, is its standard deviation."""
MAX_WINDOW_ROWS = 101
ROWS_BEFORE = 31
"""Rows whose median says what is usual just then."""
ROWS_AT_ONCE = 1 << 14


class RobustSeries:
    """The finite values of a series and their robust statistics.

    Attributes:
        start: level of the first rows, before much has happened (median of 2 %, at least 3 rows).
        end: level of the last tenth (at least 5 rows).
        smooth: [N] running median.
        noise: standard deviation around `smooth`, from the MAD; spikes do not raise it.
    """

    def __init__(self, series: Series) -> None:
        self.series = series.finite
        self.values: Floats = self.series.values

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def window(self) -> int:
        return min(MAX_WINDOW_ROWS, max(5, len(self) // 15)) | 1

    @cached_property
    def smooth(self) -> Floats:
        return running_median(self.values, self.window)

    @cached_property
    def noise(self) -> float:
        return spread(self.values - self.smooth) if len(self) else 0.0

    @property
    def num_first(self) -> int:
        """Rows whose level is `start`."""
        return max(3, len(self) // 50)

    @cached_property
    def start(self) -> float:
        return float(np.median(self.values[: self.num_first]))

    @cached_property
    def end(self) -> float:
        return float(np.median(self.values[-max(5, len(self) // 10) :]))

    @cached_property
    def lowest(self) -> float:
        return float(self.smooth.min())

    @cached_property
    def lowest_at(self) -> int:
        """Position of the lowest level."""
        return int(self.smooth.argmin())

    @cached_property
    def drop(self) -> float:
        """How far the level came down from start to end; negative where it rose."""
        return self.start - self.end

    def level(self, begin: float, end: float) -> float:
        """Median over a share of the run, such as `level(0.4, 0.6)`."""
        return float(np.median(self.part(begin, end)))

    def part(self, begin: float, end: float) -> Floats:
        """The values of a share of the run; at least one."""
        first = min(int(begin * len(self)), len(self) - 1)
        return self.values[first : max(first + 1, round(end * len(self)))]

    def step(self, position: int) -> int:
        return self.series.step(position)

    def standard_error(self, share: float = 0.1) -> float:
        """Of the median of so large a part of the run."""
        return self.error_of_median(max(1.0, share * len(self)))

    def error_of_median(self, num_rows: float) -> float:
        """Standard error of the median of so many rows, if their noise is independent."""
        return float(1.25 * self.noise / num_rows**0.5)


def running_median(values: Floats, window: int) -> Floats:
    """[N] median of the `window` (odd) values around each; shorter at the ends."""
    count = len(values)
    if count == 0:
        return values
    half = min(window // 2, (count - 1) // 2)
    if half == 0:
        return values.copy()
    result = np.empty(count)
    width = 2 * half + 1
    inner = sliding_window_view(values, width)
    for first in range(0, len(inner), ROWS_AT_ONCE):
        block = inner[first : first + ROWS_AT_ONCE]
        result[half + first : half + first + len(block)] = np.median(block, axis=1)
    for offset in range(half):
        result[offset] = np.median(values[: offset + half + 1])
        result[count - 1 - offset] = np.median(values[count - offset - half - 1 :])
    return result


def median_curvature(values: Floats) -> float:
    """Median distance of a value from the mean of its two neighbours (half the second difference);
    0 for a monotonic series."""
    ways = np.sign(np.diff(values))
    if not ((ways > 0).any() and (ways < 0).any()):
        return 0.0
    return float(np.median(np.abs(values[1:-1] - (values[:-2] + values[2:]) / 2)))


def spread(values: Floats) -> float:
    """Standard deviation, estimated from the median absolute deviation."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def median_before(values: Floats, window: int = ROWS_BEFORE) -> Floats:
    """[N] median of the up to `window` values before each; NaN for the first."""
    count = len(values)
    result = np.full(count, np.nan)
    for place in range(1, min(window, count)):
        result[place] = np.median(values[:place])
    if count > window:
        inner = sliding_window_view(values[:-1], window)
        for first in range(0, len(inner), ROWS_AT_ONCE):
            block = inner[first : first + ROWS_AT_ONCE]
            result[window + first : window + first + len(block)] = np.median(block, axis=1)
    return result


def ranks(values: Floats) -> Floats:
    """[N] rank of each value; ties keep their order."""
    places = np.empty(len(values))
    places[np.argsort(values, kind="stable")] = np.arange(len(values))
    return places


def linearity(values: Floats) -> float:
    """Pearson correlation of the values with their index: -1 for a straight fall, 0 for none."""
    if len(values) < 3 or float(values.std()) == 0.0:
        return 0.0
    return float(np.corrcoef(np.arange(len(values)), values)[0, 1])


def recent_growth(values: Floats) -> float:
    """The largest of the last three values over the median of those before; 1 where it is within
    six standard deviations."""
    if len(values) < 4:
        return float(values[-1] / values[0]) if len(values) > 1 and values[0] > 0 else 1.0
    usual = float(np.median(values[:-3]))
    width = max(spread(values[:-3][-50:]), 0.05 * abs(usual))
    peak = float(values[-3:].max())
    if usual <= 0 or peak < usual + 6 * width:
        return 1.0
    return peak / usual


def spikes(series: Series, factor: float) -> list[int]:
    """Positions of values more than `factor` times the median of those just before them."""
    values = series.finite.values
    usual = median_before(values)
    with np.errstate(invalid="ignore"):
        found = (usual > 0) & (values > factor * usual)
    found[:5] = False
    return [int(position) for position in np.flatnonzero(found)]
