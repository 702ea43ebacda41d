"""Which metric decides over the best checkpoint, the plateau, the end and the verdict; which way.

A metric and its direction are one value: where only the metric is named, the direction is that of
the task or of the metric's own name, and it is never guessed.
"""

from __future__ import annotations

from surefoot.config.fields import AS_TASK
from surefoot.config.sections import Settings
from surefoot.config.sections.contract import ContractOnSection
from surefoot.config.sections.run import EarlyStoppingOnSection
from surefoot.config.sections.schedules import PlateauSection
from surefoot.core.errors import RequestError
from surefoot.core.stopping import usual_direction
from surefoot.engine.decisions import WatchedMetric
from surefoot.tasks.task import Task


def deciding_metric(settings: Settings, task: Task) -> WatchedMetric:
    """The metric that decides: the contract's, that of early stopping, or else the task's own.

    Raises:
        RequestError: nobody knows which way it is better.
    """
    named = _of_contract(settings)
    if named is not None:
        return named
    stopping = settings.early_stopping
    if isinstance(stopping, EarlyStoppingOnSection):
        return watched_metric(stopping, "early_stopping", settings, task)
    return WatchedMetric(*task.deciding_metric)


def watched_metric(
    section: EarlyStoppingOnSection | PlateauSection, where: str, settings: Settings, task: Task
) -> WatchedMetric:
    """The metric that a rule of the run watches.

    Args:
        where: name of the section.

    Raises:
        RequestError: nobody knows which way it is better.
    """
    default = _of_contract(settings) or WatchedMetric(*task.deciding_metric)
    name = default.name if section.metric == AS_TASK else section.metric
    if section.direction != AS_TASK:
        return WatchedMetric(name, section.direction)
    if name.rpartition("/")[2] == default.name.rpartition("/")[2]:
        return WatchedMetric(name, default.direction)
    direction = usual_direction(name)
    if direction is None:
        raise RequestError(
            f"nobody says which way {name} is better",
            where=f"{where}.direction",
            rule="a metric is watched with its direction; the task and the usual names say it",
            remedy=f"set {where}.direction=max or {where}.direction=min",
        )
    return WatchedMetric(name, direction)


def saves_best(settings: Settings) -> bool:
    """Whether each best evaluation so far is saved."""
    asked = settings.checkpoint.save_best
    if asked != "auto":
        return asked == "on"
    contract = settings.contract
    judges_best = isinstance(contract, ContractOnSection) and contract.judged == "best"
    return settings.early_stopping.kind == "on" or judges_best


def _of_contract(settings: Settings) -> WatchedMetric | None:
    contract = settings.contract
    if not isinstance(contract, ContractOnSection) or contract.metric == AS_TASK:
        return None
    assert contract.direction != AS_TASK
    return WatchedMetric(contract.metric, contract.direction)


def deciding_fields(watched: WatchedMetric) -> dict[str, str]:
    """The deciding metric for the record: `name`, `direction` and, where it is named, `set`."""
    set_name, slash, name = watched.name.partition("/")
    if not slash:
        return {"name": watched.name, "direction": watched.direction}
    return {"set": set_name, "name": name, "direction": watched.direction}
