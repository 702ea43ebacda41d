"""The few statistics that verdicts rest on, each stated with its source. Pure; needs no library.

Student's t by its distribution function through the regularised incomplete beta function, which is
computed by the continued fraction of Lentz (Press et al., Numerical Recipes, 6.4).
"""

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
    half = t_quantile(0.5 + confidence / 2, degrees) * math.sqrt(total)
    return MeanDifference(difference, difference - half, difference + half, degrees)


def t_quantile(probability: float, degrees: float) -> float:
    """The value below which Student's t lies with this probability, by bisection.

    >>> round(t_quantile(0.975, 4), 3), round(t_quantile(0.975, 1e6), 3)
    (2.776, 1.96)
    """
    low, high = 0.0, 1.0
    while t_distribution(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if t_distribution(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_distribution(value: float, degrees: float) -> float:
    """Probability that Student's t with `degrees` of freedom is below `value`, `value` >= 0."""
    x = degrees / (degrees + value * value)
    return 1 - incomplete_beta(degrees / 2, 0.5, x) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x)) / a
    return front * _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
