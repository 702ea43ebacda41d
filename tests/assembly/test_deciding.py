"""The metric that decides over the best checkpoint: the task's own, or the contract's."""

from __future__ import annotations

from assembly.parts import material, settings_of
from surefoot.assembly.deciding import deciding_fields, deciding_metric
from surefoot.engine.decisions import WatchedMetric


def test_the_task_decides_unless_the_contract_names_a_metric() -> None:
    task = material().task
    assert deciding_metric(settings_of(), task) == WatchedMetric(*task.deciding_metric)
    contract = {"kind": "research", "task": "write", "metric": "held/f1", "direction": "max"}
    assert deciding_metric(settings_of(contract=contract), task) == WatchedMetric("held/f1", "max")


def test_a_metric_of_a_named_set_says_so_in_the_record() -> None:
    found = deciding_fields(WatchedMetric("held/f1", "max"))
    assert found == {"set": "held", "name": "f1", "direction": "max"}
    assert deciding_fields(WatchedMetric("loss", "min")) == {"name": "loss", "direction": "min"}
