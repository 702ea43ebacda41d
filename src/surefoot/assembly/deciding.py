"""Which metric decides over the best checkpoint, the plateau and the verdict; and which way."""

from __future__ import annotations

from surefoot.config.sections import Settings
from surefoot.config.sections.contract import ContractOnSection
from surefoot.engine.decisions import WatchedMetric
from surefoot.tasks.task import Task


def deciding_metric(settings: Settings, task: Task) -> WatchedMetric:
    """The metric that decides: the contract's, or else the task's own."""
    contract = settings.contract
    if not isinstance(contract, ContractOnSection) or contract.metric == "as-task":
        return WatchedMetric(*task.deciding_metric)
    assert contract.direction != "as-task"
    return WatchedMetric(contract.metric, contract.direction)


def deciding_fields(watched: WatchedMetric) -> dict[str, str]:
    """The deciding metric for the record: `name`, `direction` and, where it is named, `set`."""
    set_name, slash, name = watched.name.partition("/")
    if not slash:
        return {"name": watched.name, "direction": watched.direction}
    return {"set": set_name, "name": name, "direction": watched.direction}
