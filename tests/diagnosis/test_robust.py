"""Robust statistics against plain ones."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.diagnosis.recording import Series
from surefoot.diagnosis.robust import (
    RobustSeries,
    linearity,
    median_before,
    running_median,
    spread,
)


def series(values: np.ndarray) -> Series:
    count = np.arange(len(values))
    return Series(count, count.astype(float), values.astype(float))


@pytest.mark.parametrize("count", [1, 2, 5, 50, 20_000])
def test_running_median_is_the_median_around_each(count: int) -> None:
    values = np.random.default_rng(0).normal(size=count)
    found = running_median(values, 7)
    half = min(3, (count - 1) // 2)
    for place in {0, 1, count // 2, count - 1} & set(range(count)):
        around = values[max(0, place - half) : place + half + 1]
        assert found[place] == np.median(around)
    assert len(found) == count


@pytest.mark.parametrize("count", [1, 4, 6, 20_000])
def test_median_before_is_that_of_the_values_before_each(count: int) -> None:
    values = np.random.default_rng(0).normal(size=count)
    found = median_before(values, 5)
    assert np.isnan(found[0])
    for place in {1, 3, 5, count // 2, count - 1} & set(range(1, count)):
        assert found[place] == np.median(values[max(0, place - 5) : place])


def test_spread_is_sigma_and_minds_no_spike() -> None:
    values = np.random.default_rng(1).normal(scale=3.0, size=10_000)
    assert spread(values) == pytest.approx(3.0, rel=0.05)
    values[:500] = 1e9
    assert spread(values) == pytest.approx(3.0, rel=0.2)


def test_levels_and_noise_of_a_curve() -> None:
    noise = np.random.default_rng(2).normal(scale=0.1, size=400)
    values = np.linspace(5, 1, 400) + noise
    values[[50, 200]] = 100.0, np.nan
    curve = RobustSeries(series(values))
    assert len(curve) == 399
    assert curve.start == pytest.approx(5, abs=0.2)
    assert curve.end == pytest.approx(1.2, abs=0.2)
    assert curve.noise == pytest.approx(0.1, rel=0.3)
    assert curve.level(0.45, 0.55) == pytest.approx(3, abs=0.1)
    assert curve.drop == curve.start - curve.end
    assert linearity(curve.smooth) < -0.99


def test_linearity_of_noise_is_about_zero() -> None:
    values = np.random.default_rng(3).normal(size=1000)
    assert abs(linearity(values)) < 0.1
    assert linearity(np.ones(5)) == 0.0
