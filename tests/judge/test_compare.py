"""Runs against each other: what is claimed, and what is not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_ind

from judge.folders import CONFIG, CONTRACT, make_folder
from surefoot.core.reports import Event
from surefoot.judge.compare import ComparisonOutcome, compare_runs
from surefoot.judge.statistics import spread_of, welch
from surefoot.observe.readers.run_data import RunData, read_run


def made(root: Path, name: str, value: float, seed: int = 0, **changes: Any) -> RunData:
    config = {**CONFIG, "seed": seed, **changes.pop("config", {})}
    path = make_folder(
        root / name, config=config, evaluations=[{"validation/accuracy": value}], **changes
    )
    return read_run(path)


def several(root: Path, name: str, values: list[float], **changes: Any) -> list[RunData]:
    return [
        made(root, f"{name}{seed}", value, seed, **changes) for seed, value in enumerate(values)
    ]


def outcome(runs: list[RunData]) -> ComparisonOutcome:
    (result,) = [r for r in compare_runs(runs).results if r.metric == "validation/accuracy"]
    return result.outcome


OTHER = {"optimizer": {"kind": "sgd", "lr": 0.2}}


def test_two_seeds_alone_show_no_difference(tmp_path: Path) -> None:
    runs = several(tmp_path, "a", [0.8, 0.9])
    found = compare_runs(runs)
    assert [fact.name for fact in found.facts] == ["seed"]
    assert [experiment.label for experiment in found.experiments] == ["A, B"]
    assert found.claim.startswith("no difference shown: 2 seeds of one experiment")
    assert not found.stops_a_pipeline


def test_one_run_of_each_is_not_enough(tmp_path: Path) -> None:
    runs = [made(tmp_path, "a", 0.1), made(tmp_path, "b", 0.9, config=OTHER)]
    assert outcome(runs) is ComparisonOutcome.NOT_SHOWN
    assert "1 and 1 finished seeds" in compare_runs(runs).claim


@pytest.mark.parametrize(
    ("after", "shown"),
    [
        ([0.95, 0.96, 0.97], ComparisonOutcome.BETTER),
        ([0.65, 0.66, 0.67], ComparisonOutcome.WORSE),
        ([0.805, 0.83, 0.79], ComparisonOutcome.NO_DIFFERENCE),
        ([0.95, 0.96], ComparisonOutcome.NOT_SHOWN),
    ],
)
def test_three_seeds_of_each_tell_a_difference(
    tmp_path: Path, after: list[float], shown: ComparisonOutcome
) -> None:
    runs = several(tmp_path, "a", [0.80, 0.81, 0.82])
    runs += several(tmp_path, "b", after, config=OTHER)
    assert outcome(runs) is shown
    assert compare_runs(runs).stops_a_pipeline is (shown is ComparisonOutcome.WORSE)


def test_the_same_seed_twice_is_one_repeat(tmp_path: Path) -> None:
    runs = several(tmp_path, "a", [0.80, 0.81, 0.82])
    again = [made(tmp_path, f"b{i}", 0.95, seed=0, config=OTHER) for i in range(3)]
    assert outcome(runs + again) is ComparisonOutcome.NOT_SHOWN


def test_runs_that_did_not_finish_do_not_count(tmp_path: Path) -> None:
    runs = several(tmp_path, "a", [0.80, 0.81, 0.82])
    runs += several(tmp_path, "b", [0.95, 0.96], config=OTHER)
    killed = [Event("start", 0, "started", {}, 1000.0)]
    runs.append(made(tmp_path, "b2", 0.97, 2, config=OTHER, events=killed))
    assert outcome(runs) is ComparisonOutcome.NOT_SHOWN


def test_other_data_is_another_experiment(tmp_path: Path) -> None:
    records = [{"data": {"fingerprints": {"train": mark}}} for mark in "xy"]
    runs = [made(tmp_path, f"a{i}", 0.8, i, record=record) for i, record in enumerate(records)]
    found = compare_runs(runs)
    assert len(found.experiments) == 2
    assert ("data", "train", ("x", "y")) in [(f.area, f.name, f.values) for f in found.facts]


def test_code_and_environment_are_compared(tmp_path: Path) -> None:
    records = [
        {"git": {"commit": c}, "packages": {"torch": v}} for c, v in (("1", "2.12"), ("2", "2.13"))
    ]
    runs = [made(tmp_path, f"a{i}", 0.8, record=record) for i, record in enumerate(records)]
    facts = {(f.area, f.name): f.values for f in compare_runs(runs).facts}
    assert facts == {
        ("code", "commit"): ("1", "2"),
        ("environment", "package.torch"): ("2.12", "2.13"),
    }


def test_a_broken_contract_of_a_later_run_stops_a_pipeline(tmp_path: Path) -> None:
    good = made(tmp_path, "a", 0.8, contract={**CONTRACT, "target": 0.7})
    bad = made(tmp_path, "b", 0.6, 1, contract={**CONTRACT, "target": 0.7})
    assert compare_runs([good, bad]).stops_a_pipeline
    assert not compare_runs([bad, good]).stops_a_pipeline


def test_a_metric_that_is_not_finite_shows_nothing(tmp_path: Path) -> None:
    runs = several(tmp_path, "a", [0.80, 0.81, 0.82])
    runs += several(tmp_path, "b", [0.95, 0.96, float("nan")], config=OTHER)
    assert outcome(runs) is ComparisonOutcome.NOT_SHOWN


# What the version before computed by a continued fraction of its own.
@pytest.mark.parametrize(
    ("first", "second", "interval"),
    [
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], (0.7330420644724831, 5.2669579355275165)),
        (
            [0.8, 0.81, 0.82],
            [0.805, 0.83, 0.79, 0.81],
            (-0.0273241118020495, 0.0248241118020495),
        ),
        ([1e-3, 5e-3], [2.0, 2.5, 1.5], (0.7550155822083875, 3.2389844177916127)),
    ],
)
def test_the_interval_is_that_of_welch(
    first: list[float], second: list[float], interval: tuple[float, float]
) -> None:
    found = welch(first, second)
    assert (found.low, found.high) == pytest.approx(interval, rel=1e-12)
    theirs = ttest_ind(second, first, equal_var=False)
    assert (found.low, found.high) == pytest.approx(theirs.confidence_interval(0.95), rel=1e-12)
    assert found.degrees == pytest.approx(theirs.df, rel=1e-12)


def test_the_interval_covers_as_often_as_it_says() -> None:
    # 2000 pairs of three normal values with means 1 apart: Welch's interval is a bit too wide for
    # so few values, never too narrow by more than chance (three deviations of 2000 draws: 1.5 %).
    draw = random.Random(0)
    covered = 0
    for _ in range(2000):
        first = [draw.gauss(0, 1) for _ in range(3)]
        second = [draw.gauss(1, 2) for _ in range(3)]
        found = welch(first, second)
        covered += found.low <= 1 <= found.high
    assert covered / 2000 > 0.935


def test_equal_values_have_no_interval() -> None:
    found = welch([1.0, 1.0], [1.0, 1.0])
    assert (found.difference, found.excludes_zero) == (0.0, False)
    assert spread_of([2.0]).count == 1
