"""The base of a task that adds something to another."""

from __future__ import annotations

from abc import ABC
from typing import Any

from torch import nn

from surefoot.tasks.task import Direction, LossSum, MetricSums, Task, Weight


class TaskWrapper(ABC):  # noqa: B024 -- a base, not to be used as it stands
    """A task around another: what a wrapper does not define is that of the task inside.

    Args:
        task: the task inside.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    @property
    def unit(self) -> str:
        return self.task.unit

    @property
    def deciding_metric(self) -> tuple[str, Direction]:
        return self.task.deciding_metric

    def weight(self, batch: Any) -> Weight:
        return self.task.weight(batch)

    def loss_sum(self, model: nn.Module, batch: Any) -> LossSum:
        return self.task.loss_sum(model, batch)

    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        return self.task.metric_sums(model, batch)
