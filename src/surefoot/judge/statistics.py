"""The few statistics that verdicts rest on, each stated with its source. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """A few values of one quantity."""

    count: int
    mean: float
    deviation: float
    """Sample standard deviation, divisor n - 1; NaN for fewer than two values."""
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """The difference of two means, second minus first, and its confidence interval."""

    difference: float
    low: float
    high: float
    degrees: float
    """Degrees of freedom of Welch and Satterthwaite."""

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def spread_of(values: Sequence[float]) -> Spread:
    """Count, mean, standard deviation and range.

    >>> spread_of([1.0, 2.0, 3.0])
    Spread(count=3, mean=2.0, deviation=1.0, low=1.0, high=3.0)
    """
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    deviation = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else math.nan
    return Spread(len(values), mean, deviation, min(values), max(values))


def welch(
    first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE
) -> MeanDifference:
    """The interval of the difference of two means whose variances may differ (Welch, 1947).

    Each side needs at least two values.

    >>> round(welch([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]).low, 3)
    0.733
    """
    a, b = spread_of(first), spread_of(second)
    variance_a, variance_b = a.deviation**2 / a.count, b.deviation**2 / b.count
    total = variance_a + variance_b
    difference = b.mean - a.mean
    if total == 0:
        # Equal values on each side: no spread was seen, and no interval follows from none.
        return MeanDifference(difference, difference, difference, math.inf)
    degrees = total**2 / (variance_a**2 / (a.count - 1) + variance_b**2 / (b.count - 1))
    # Here alone: most commands compare nothing, and it takes a third of a second to import.
    from scipy.special import stdtrit

    half = float(stdtrit(degrees, 0.5 + confidence / 2)) * math.sqrt(total)
    return MeanDifference(difference, difference - half, difference + half, degrees)
