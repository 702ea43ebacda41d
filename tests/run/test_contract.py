"""A contract names what the run will measure; what it promised is kept over a resume."""

from __future__ import annotations

from typing import Any

import pytest

from assembly.parts import material, settings_of
from surefoot.core.errors import RequestError, SurefootError
from surefoot.run.contract import check_contract, promise


def with_contract(**more: Any):  # type: ignore[no-untyped-def]
    return settings_of(contract={"kind": "research", "task": "write", **more})


def measured() -> dict[str, float]:
    return {"validation/loss": 1.0}


def test_a_metric_that_is_not_measured_is_refused_with_those_that_are() -> None:
    check_contract(with_contract(metric="validation/loss", direction="min"), measured)
    check_contract(with_contract(metric="loss", direction="min"), measured)
    with pytest.raises(RequestError, match="the contract names the metric f1") as caught:
        check_contract(with_contract(metric="f1", direction="max"), measured)
    assert "validation/loss" in caught.value.rule


def test_without_a_contract_nothing_is_measured() -> None:
    check_contract(settings_of(), lambda: 1 / 0)  # type: ignore[return-value, arg-type]
    promised = promise(settings_of(), material().task, {})
    assert promised["horizon"] == "6 steps" and "metric" not in promised


def test_a_baseline_that_cannot_be_read_is_refused_unless_its_values_are_held() -> None:
    settings, task = with_contract(baseline="nowhere"), material().task
    with pytest.raises(SurefootError):
        promise(settings, task, {})
    held = {"baseline": {"run": "nowhere", "values": {"validation/loss": 0.5}}}
    assert promise(settings, task, held)["baseline"] == held["baseline"]
