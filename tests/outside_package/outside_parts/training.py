"""An optimizer, a schedule, a clip and a sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import surefoot


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
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(state["mean"].sign(), alpha=group["lr"])


def halving(n: int, every: int = 4) -> float:
    """Half the rate after every so many updates."""
    return float(0.5 ** (n // every))


class ClipEachElement:
    """Clips each element of the gradient to `[-max_norm, max_norm]`."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def __call__(self, gradients: Sequence[Tensor], norm: Tensor) -> None:
        for gradient in gradients:
            gradient.clamp_(-self.max_norm, self.max_norm)


class EveryOther(surefoot.SampleOrder):
    """The even samples, then the odd ones; the start moves by one each epoch."""

    def indices(self, seed: int, epoch: int, positions: np.ndarray, num_samples: int) -> np.ndarray:
        order = np.concatenate([np.arange(0, num_samples, 2), np.arange(1, num_samples, 2)])
        return np.roll(order, epoch)[positions]


def every_other(source: Any) -> EveryOther:
    """The even samples, then the odd ones."""
    return EveryOther()
