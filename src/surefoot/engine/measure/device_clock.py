"""Where the time of an update goes on the device, by events in its queue, on sampled updates only.

It never waits while a run trains: the events of one sample are read when the next one begins.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from surefoot.tasks.task import LossSum, Task
from surefoot.tasks.wrapper import TaskWrapper


class DeviceClock:
    """Time between marks in the queue of a CUDA device, by the name of the earlier mark.

    `forward` holds the loss; `norm and clip` also unscaling and what is left of the reduction over
    ranks when the backward has ended; `between` is from the end of the optimizer's step to the
    next update: average, other measures, and the device's wait for the host. Copies from the host
    run on a stream of their own beside all that.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_open = False
        """Whether a sampled update has begun and its last mark is still to come."""
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._milliseconds: dict[str, float] = {}
        self._num_samples = 0

    def begin(self) -> None:
        """A sampled update begins."""
        self._count()
        self.is_open = True

    def mark(self, phase: str) -> None:
        """`phase` begins here in the queue."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def end(self) -> None:
        """The next update begins: the sample is whole."""
        self.mark("end")
        self.is_open = False

    def milliseconds(self) -> dict[str, float] | None:
        """Mean of each phase over the samples; None before the first. Waits for the device."""
        if self.is_open:
            self.end()
        if self._marks:
            self._marks[-1][1].synchronize()
        self._count()
        if not self._num_samples:
            return None
        return {
            name: round(total / self._num_samples, 4) for name, total in self._milliseconds.items()
        }

    def _count(self) -> None:
        marks, self._marks = self._marks, []
        if not marks:
            return
        if not marks[-1][1].query():
            return  # Not there yet: this sample is left out rather than waited for.
        for (phase, event), (_, later) in pairwise(marks):
            elapsed = float(event.elapsed_time(later))
            self._milliseconds[phase] = self._milliseconds.get(phase, 0.0) + elapsed
        self._num_samples += 1


class TimedTask(TaskWrapper):
    """A task whose loss marks where the forward begins and where the backward does."""

    def __init__(self, task: Task, clock: DeviceClock) -> None:
        super().__init__(task)
        self._clock = clock

    def loss_sum(self, model: nn.Module, batch: Any) -> LossSum:
        if not self._clock.is_open:
            return self.task.loss_sum(model, batch)
        self._clock.mark("forward")
        loss = self.task.loss_sum(model, batch)
        self._clock.mark("backward")
        return loss
