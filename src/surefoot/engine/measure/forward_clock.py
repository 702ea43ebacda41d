"""Host time of the forwards, by which ranks of unequal speed are told apart."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch import nn

from surefoot.tasks.task import LossSum, Task
from surefoot.tasks.wrapper import TaskWrapper


class ForwardClock(TaskWrapper):
    """A task that counts the host time of its losses."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.seconds = 0.0
        """Of all losses so far."""

    def loss_sum(self, model: nn.Module, batch: Any) -> LossSum:
        began = perf_counter()
        loss = self.task.loss_sum(model, batch)
        self.seconds += perf_counter() - began
        return loss
