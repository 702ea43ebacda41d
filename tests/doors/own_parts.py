"""Parts of somebody's own, as a person would write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.core.reports import Event, StepReport
from surefoot.data.order import IndexArray, SampleOrder
from surefoot.data.sources.arrays import ArraySource


class SignDescent(torch.optim.Optimizer):
    """The sign of a running mean of the gradient, as in Lion, arXiv:2302.06675."""

    def __init__(self, groups: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(groups, {"lr": lr, "beta": beta, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["beta"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(mean.sign(), alpha=group["lr"])


def halving(n: int, every: int = 4) -> float:
    """Half the rate after every so many updates."""
    return float(0.5 ** (n // every))


class LimitEach:
    """Clips each element of the gradient."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        for gradient in gradients:
            gradient.clamp_(-self.limit, self.limit)


class EveryOther(SampleOrder):
    """The even samples, then the odd ones; turned by one a epoch."""

    def indices(self, seed: int, epoch: int, positions: IndexArray, num_samples: int) -> IndexArray:
        order = np.concatenate([np.arange(0, num_samples, 2), np.arange(1, num_samples, 2)])
        return np.roll(order, epoch)[positions]


def every_other(source: Any) -> SampleOrder:
    return EveryOther()


def squares(num_samples: int = 40) -> ArraySource:
    """Rows of two numbers, and the class of the larger one."""
    rows = torch.randn(num_samples, 2, generator=torch.Generator().manual_seed(0))
    return ArraySource((rows, (rows[:, 0] > rows[:, 1]).long()), "squares")


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    rows, labels = batch
    return ((model(rows)[:, 0] - labels) ** 2).sum()


def largest_output(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    return model(batch[0]).abs().sum(), float(len(batch[0]))


class Counter:
    """Counts what it is told."""

    made: ClassVar[list[Counter]] = []

    def __init__(self, start: int = 0) -> None:
        self.steps = start
        self.kinds: list[str] = []
        Counter.made.append(self)

    def on_step(self, report: StepReport) -> None:
        self.steps += 1

    def on_event(self, event: Event) -> None:
        self.kinds.append(event.kind)
