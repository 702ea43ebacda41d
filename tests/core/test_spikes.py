"""Spikes are found on real curves with heavy tails, and nothing else is; one hides no other.

The curves below `curves/` are the losses and gradient norms of 4,000 updates of small models: a GPT
on Python's own source, a residual network on digits (one of them until it knew each by heart), a
perceptron on a table of ten columns.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import median

import pytest

from surefoot.core.errors import RequestError
from surefoot.core.spikes import LOSS_RULE, NORM_RULE, Spike, SpikeRule, SpikeWindow

CURVES = sorted((Path(__file__).parent / "curves").glob("*.json"))
SIGNALS = {"loss": LOSS_RULE, "grad_norm": NORM_RULE}
SPREAD = 64
"""Values on either side that a residual is taken against."""
NEARBY = 48
BLOCK = 8
"""Values that are drawn together: neighbours in a curve are alike."""


def read(curve: Path) -> dict[str, list[float]]:
    content: dict[str, list[float]] = json.loads(curve.read_text("utf-8"))
    return content


def flagged(rule: SpikeRule, values: list[float]) -> list[int]:
    window = SpikeWindow(rule)
    return [index for index, value in enumerate(values) if window.judge(value) is not None]


def naive(rule: SpikeRule, values: list[float]) -> list[float | None]:
    """The limit of each spike by the rule as it is written down, computed anew for each value."""
    entered: list[float] = []
    newest: float | None = None
    found: list[float | None] = []
    for value in values:
        window = sorted(entered[-rule.num_values :])
        limit = math.inf
        if len(window) >= rule.min_values:
            middle = len(window) // 2
            center = window[middle]
            if window[0] > 0:
                away = sorted(abs(math.log(x / center)) for x in window)[middle] * 1.4826
                limit = rule.least_ratio * center * math.exp(rule.num_deviations * away)
            else:
                away = sorted(abs(x - center) for x in window)[middle] * 1.4826
                limit = center + (rule.least_ratio - 1) * abs(center) + rule.num_deviations * away
        is_spike = math.isfinite(value) and value >= limit
        found.append(limit if is_spike else None)
        if newest is not None:
            entered.append(newest)
        newest = value if math.isfinite(value) and not is_spike else None
    return found


@pytest.mark.parametrize("curve", CURVES, ids=lambda path: path.stem)
@pytest.mark.parametrize("signal", SIGNALS)
def test_no_alarm_on_a_real_curve(curve: Path, signal: str) -> None:
    assert flagged(SIGNALS[signal], read(curve)[signal]) == []


def bootstrapped(values: list[float], length: int, seed: int) -> list[float]:
    """A curve of `length` with the course of a real one and blocks of its real residuals."""
    draw = random.Random(seed)
    course = [median(values[max(0, i - SPREAD) : i + SPREAD]) for i in range(0, len(values), BLOCK)]
    residuals = [math.log(value / course[i // BLOCK]) for i, value in enumerate(values)]
    made: list[float] = []
    while len(made) < length:
        at = len(made) * len(values) // length
        # From nearby in the run: the spread changes over a run, too.
        start = min(max(0, at + draw.randrange(-NEARBY, NEARBY)), len(values) - BLOCK)
        made += [course[at // BLOCK] * math.exp(r) for r in residuals[start : start + BLOCK]]
    return made[:length]


@pytest.mark.parametrize("signal", SIGNALS)
def test_at_most_one_false_alarm_in_a_hundred_thousand(signal: str) -> None:
    length = 30_000
    alarms = [
        flagged(SIGNALS[signal], bootstrapped(read(curve)[signal], length, seed))
        for seed, curve in enumerate(CURVES)
    ]
    assert len(CURVES) * length >= 100_000
    assert sum(map(len, alarms)) <= 1, alarms


INJECTED = {"gpt": (2.5, 10), "cnn": (4, 100), "mlp": (60, 60)}
"""A spike multiplies loss and norm by so much or up to five times as much: what stands out of the
natural spread of the curve. Nothing would where samples are known by heart: there losses differ by
three orders of magnitude from batch to batch."""


@pytest.mark.parametrize("name", INJECTED)
@pytest.mark.parametrize("signal", SIGNALS)
def test_injected_spikes_are_found_also_in_the_window_of_another(name: str, signal: str) -> None:
    values = read(CURVES[0].with_name(f"{name}.json"))[signal]
    draw = random.Random(7)
    least = INJECTED[name][signal == "grad_norm"]
    places = set()
    at = 150
    while at < len(values) - 1:
        # A spike lasts one to four updates; every other one comes within the window of the last.
        for place in range(at, min(at + draw.randrange(1, 5), len(values))):
            values[place] = (
                least * median(values[max(0, place - 32) : place + 1]) * draw.uniform(1, 5)
            )
            places.add(place)
        at += draw.choice((20, 60, 200))
    found = set(flagged(SIGNALS[signal], values))
    assert len(found & places) >= 0.99 * len(places), sorted(places - found)[:10]
    assert len(found - places) == 0
    assert len(places) > 50


def test_the_cheap_rule_is_the_naive_rule() -> None:
    draw = random.Random(3)
    for scale, shift in ((0.1, 0.0), (1.0, 0.0), (0.3, -1.0)):
        values = [math.exp(draw.gauss(0, scale)) + shift for _ in range(1500)]
        for _ in range(60):
            place = draw.randrange(len(values))
            values[place] = draw.choice([math.nan, math.inf, -math.inf, values[place] * 30, 0.0])
        rule = SpikeRule(least_ratio=1.3, num_deviations=2.5, new_level_after=10**6)
        window = SpikeWindow(rule)
        judged = [window.judge(value) for value in values]
        limits = [spike.limit if spike else 0.0 for spike in judged]
        assert limits == pytest.approx([limit or 0.0 for limit in naive(rule, values)], rel=1e-6)
        assert any(limits)


def test_one_that_is_not_finite_poisons_nothing() -> None:
    draw = random.Random(1)
    values = [1 + 0.01 * draw.random() for _ in range(400)]
    with_nan = [math.nan if i in (100, 200) else v for i, v in enumerate(values)]
    with_nan[201] = math.inf
    for row in (values, with_nan):
        row[150] = row[300] = 9.0
        assert flagged(LOSS_RULE, row) == [150, 300]


def test_the_statistics_of_an_update_end_two_before_it() -> None:
    rule = SpikeRule(least_ratio=2.0, num_values=4, min_values=2)
    window = SpikeWindow(rule)
    values = [1.0, 1.0, 4.0]
    for value in values:
        assert window.judge(value) is None
    # Known when the next is queued, with the update before in flight or not: never the 4.
    assert window.limit(in_flight=False) == 2.0
    assert window.judge(3.0) == Spike(3.0, 2.0, 1.0)
    assert window.limit(in_flight=True) == window.limit(in_flight=False) == 2.0


def test_the_limit_is_the_same_whether_the_update_before_is_in_flight() -> None:
    draw = random.Random(5)
    window = SpikeWindow(NORM_RULE)
    for _ in range(300):
        planned = window.limit(in_flight=True)
        window.judge(math.exp(draw.gauss(0, 0.5)))
        assert window.limit(in_flight=False) == planned


def test_a_restart_changes_no_judgement() -> None:
    draw = random.Random(2)
    values = [math.exp(draw.gauss(0, 0.2)) * draw.choice([1] * 40 + [8]) for _ in range(600)]
    whole = SpikeWindow(LOSS_RULE)
    expected = [whole.judge(value) for value in values]
    window = SpikeWindow(LOSS_RULE)
    found = []
    for index, value in enumerate(values):
        if index % 37 == 0:
            state = json.loads(json.dumps(window.state_dict(), allow_nan=False))
            window = SpikeWindow(LOSS_RULE)
            window.load_state_dict(state)
        found.append(window.judge(value))
    assert found == expected and any(expected)


def test_a_new_level_is_spikes_only_for_a_while() -> None:
    rule = SpikeRule(least_ratio=1.5, new_level_after=8)
    window = SpikeWindow(rule)
    judged = [window.judge(value) for value in [1.0] * 100 + [5.0] * 200 + [20.0]]
    assert [spike is not None for spike in judged] == (
        [False] * 100 + [True] * 8 + [False] * 192 + [True]
    )
    assert [spike.new_level for spike in judged if spike] == [False] * 7 + [True, False]


@pytest.mark.parametrize(
    "wrong",
    [{"least_ratio": 1.0}, {"num_deviations": 0.0}, {"min_values": 1}, {"num_values": 10}],
)
def test_a_rule_without_a_limit_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        SpikeRule(**{"least_ratio": 2.0, **wrong})  # type: ignore[arg-type]
