"""The verdict on a run: each clause held, broken, or not shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from judge.folders import BUDGET, CONFIG, CONTRACT, finished, make_folder
from surefoot.core.reports import Event
from surefoot.judge.contract import verdict_on
from surefoot.judge.verdict import Clause, ContractVerdict, Standing
from surefoot.observe.readers.run_data import read_run

HELD, BROKEN, NOT_SHOWN = Standing.HELD, Standing.BROKEN, Standing.NOT_SHOWN
START = Event("start", 0, "started", {"devices": 1}, 1000.0)


def verdict(path: Path, **changes: Any) -> ContractVerdict:
    contract = {**CONTRACT, **changes.pop("contract", {})}
    found = verdict_on(read_run(make_folder(path, contract=contract, **changes)))
    assert found is not None
    return found


def clause(found: ContractVerdict, name: str) -> Clause:
    (one,) = [clause for clause in found.clauses if clause.name == name]
    return one


def test_a_run_without_a_contract_has_no_verdict(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", contract={"horizon": "3 steps"})
    assert verdict_on(read_run(path)) is None


def test_a_slice_regression_breaks_it_though_the_mean_improves(tmp_path: Path) -> None:
    before = {"day/accuracy": 0.80, "night/accuracy": 0.80}
    slices = [{"metric": name, "direction": "max", "allowed_regression": 0.01} for name in before]
    promised = {"baseline": {"run": "x", "values": before}, "slices": slices, "target": 0.8}
    now = {"day/accuracy": 0.95, "night/accuracy": 0.78}
    assert sum(now.values()) > sum(before.values())
    found = verdict(tmp_path / "run", contract=promised, evaluations=[now])
    assert clause(found, "slices.day/accuracy").standing is HELD
    assert clause(found, "slices.night/accuracy").standing is BROKEN
    assert clause(found, "target").standing is HELD
    assert found.standing is BROKEN
    assert found.claim == "the contract is broken: slices.night/accuracy"
    # Within what is allowed, to the last digit.
    now["night/accuracy"] = 0.79
    found = verdict(tmp_path / "other", contract=promised, evaluations=[now])
    assert clause(found, "slices.night/accuracy").standing is HELD


@pytest.mark.parametrize(("night", "standing"), [(0.52, HELD), (0.5, HELD), (0.53, BROKEN)])
def test_a_slice_whose_metric_is_better_where_it_is_smaller(
    night: float, standing: Standing, tmp_path: Path
) -> None:
    before = {"day/loss": 0.5, "night/loss": 0.5}
    slices = [{"metric": name, "direction": "min", "allowed_regression": 0.02} for name in before]
    promised = {"baseline": {"run": "x", "values": before}, "slices": slices}
    now = {"day/loss": 0.1, "night/loss": night}
    found = verdict(tmp_path / "run", contract=promised, evaluations=[now])
    assert clause(found, "slices.day/loss").standing is HELD
    assert clause(found, "slices.night/loss").standing is standing


@pytest.mark.parametrize(
    ("direction", "value", "standing"),
    [
        ("max", 0.9, HELD),
        ("max", 0.89, BROKEN),
        ("min", 0.9, HELD),
        ("min", 0.91, BROKEN),
        ("max", math.nan, BROKEN),
        ("min", math.nan, BROKEN),
    ],
)
def test_a_target_in_both_directions(
    tmp_path: Path, direction: str, value: float, standing: Standing
) -> None:
    deciding = {"name": "accuracy", "direction": direction}
    found = verdict(
        tmp_path / "run",
        contract={"target": 0.9},
        record={"extra": {"deciding_metric": deciding}},
        evaluations=[{"validation/accuracy": value}],
    )
    assert clause(found, "target").standing is standing


def test_the_last_evaluation_counts_or_that_of_the_best_kept_checkpoint(tmp_path: Path) -> None:
    values = [{"validation/accuracy": value} for value in (0.7, 0.95, 0.8)]
    last = verdict(tmp_path / "last", contract={"target": 0.9}, evaluations=values)
    assert clause(last, "target").standing is BROKEN
    promised = {"target": 0.9, "judged": "best"}
    path = make_folder(tmp_path / "best", contract={**CONTRACT, **promised}, evaluations=values)
    run = read_run(path)
    found = verdict_on(run)
    assert found is not None
    assert clause(found, "target").standing is NOT_SHOWN  # No checkpoint was kept.
    for name in ("step-00000002", "step-²3", "step-x3", "step-3"):  # Only the first is one.
        (path / "checkpoints" / name).mkdir()
    found = verdict_on(read_run(path))
    assert found is not None
    assert clause(found, "target") == Clause(
        "target", HELD, "validation/accuracy >= 0.9", "0.95 at update 2"
    )


@pytest.mark.parametrize(
    ("budget", "name", "used"),
    [
        ({"device_hours": 1.5}, "device_hours", 2.0),
        ({"wall_clock": "45 min"}, "wall_clock", 3600.0),
        ({"cost": 7.0, "price_per_device_hour": 4.0}, "cost", 8.0),
    ],
)
def test_more_than_the_budget_is_broken_and_less_is_held(
    tmp_path: Path, budget: dict[str, Any], name: str, used: float
) -> None:
    start = Event("start", 0, "started", {"devices": 2}, 1000.0)
    events = [start, finished(3)]
    found = verdict(tmp_path / "run", contract={"budget": {**BUDGET, **budget}}, events=events)
    assert clause(found, f"budget.{name}").standing is BROKEN
    assert f"{used:g} of" in clause(found, f"budget.{name}").found
    larger = {**BUDGET, **budget, name: "2 h" if name == "wall_clock" else 9.0}
    found = verdict(tmp_path / "other", contract={"budget": larger}, events=events)
    assert clause(found, f"budget.{name}").standing is HELD


def test_a_run_that_its_budget_ended_says_where(tmp_path: Path) -> None:
    events = [
        START,
        Event("budget", 3, "the budget is spent", {"limit": "device_hours"}, 4599.0),
        Event("stopped", 3, "the budget is spent", {}, 4600.0),
    ]
    # Slightly below the limit: two clocks; the event decides.
    promised = {"budget": {**BUDGET, "device_hours": 1.0001}, "target": 0.5}
    record = {"extra": {"horizon_updates": 10}}
    found = verdict(tmp_path / "run", contract=promised, events=events, record=record)
    assert clause(found, "budget.device_hours").standing is BROKEN
    assert "it ended the run at update 3 of 10" in clause(found, "budget.device_hours").found
    assert clause(found, "end").standing is NOT_SHOWN
    assert clause(found, "target").standing is NOT_SHOWN
    assert found.standing is BROKEN


@pytest.mark.parametrize(
    ("kinds", "standing"),
    [(["finished"], HELD), (["stopped"], NOT_SHOWN), ([], NOT_SHOWN), (["failure"], BROKEN)],
)
def test_the_end_of_a_run(tmp_path: Path, kinds: list[str], standing: Standing) -> None:
    events = [START, *(Event(kind, 3, "so", {}, 2000.0) for kind in kinds)]
    assert clause(verdict(tmp_path / "run", events=events), "end").standing is standing


@pytest.mark.parametrize(
    ("tier", "rule", "standing"),
    [
        ("T0", "T0", NOT_SHOWN),
        ("T1", "T0", BROKEN),
        ("T1", "T1", NOT_SHOWN),
        ("", "T2", BROKEN),
        ("T3", "T2", BROKEN),
        ("T3", "T3", NOT_SHOWN),
    ],
)
def test_a_resume_keeps_what_the_rule_says(
    tmp_path: Path, tier: str, rule: str, standing: Standing
) -> None:
    resume = Event("resume", 2, "resumed", {"tier": tier}, 2000.0)
    events = [START, resume, finished(3)]
    found = verdict(tmp_path / "run", contract={"resume": rule}, events=events)
    # NOT_SHOWN: there is no checkpoint in this folder.
    assert clause(found, "resume").standing is standing


def test_the_kind_of_result_demands_its_evidence(tmp_path: Path) -> None:
    clean = {"commit": "abc", "dirty": False}
    record = {
        "git": clean,
        "packages": {"torch": "2"},
        "data": {"fingerprints": {"train": "f"}},
    }
    benchmark = {"kind": "benchmark"}
    for seed in range(3):
        found = verdict(
            tmp_path / f"run-{seed}",
            contract=benchmark,
            record=record,
            config={**CONFIG, "seed": seed},
        )
        standing = clause(found, "evidence.repeats").standing
        assert standing is (HELD if seed == 2 else NOT_SHOWN)
    assert clause(found, "evidence.code").standing is HELD
    record["git"] = {**clean, "dirty": True}
    found = verdict(tmp_path / "dirty", contract=benchmark, record=record)
    assert clause(found, "evidence.code").standing is NOT_SHOWN
    names = {c.name for c in verdict(tmp_path / "research").clauses}
    assert "evidence.repeats" not in names and "evidence.evaluation" in names


def test_a_contract_that_cannot_be_read_is_broken(tmp_path: Path) -> None:
    found = verdict(tmp_path / "run", contract={"slices": [{"metric": "a/b"}]})
    assert found.standing is BROKEN
    assert found.clauses[0].name == "contract"
