"""Evaluation: exact for any batch size, and without a trace.

Numerators and denominators are summed over the whole set and divided once. Random state, modes and
gradients are as they were before; a padded sample has weight 0 and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surefoot.core.errors import DataError
from surefoot.data.batch import MicroBatch
from surefoot.engine.passes import TOTAL
from surefoot.numerics.determinism import preserved_rng
from surefoot.numerics.modes import evaluation_mode
from surefoot.numerics.precision import Precision
from surefoot.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    metrics: dict[str, float]
    weight: float
    """Loss-bearing items that the loss was averaged over."""
    samples: int


class RunningRatios:
    """Sums numerators and denominators on the device, in float64 where the device has it."""

    def __init__(self) -> None:
        self._numerators: dict[str, Tensor] = {}
        self._denominators: dict[str, Tensor | float] = {}

    def add(self, sums: dict[str, tuple[Tensor, Tensor | float]]) -> None:
        for name, (numerator, denominator) in sums.items():
            wide = numerator.detach().to(_widest(numerator.device))
            if isinstance(denominator, Tensor):
                denominator = denominator.detach().to(_widest(denominator.device))
            if name in self._numerators:
                self._numerators[name] += wide
                self._denominators[name] = self._denominators[name] + denominator
            else:
                self._numerators[name] = wide.clone()
                self._denominators[name] = denominator

    def denominator(self, name: str) -> float:
        return float(self._denominators[name])

    def ratios(self) -> dict[str, float]:
        """Each metric's value; NaN where nothing counted."""
        values = {}
        for name, numerator in self._numerators.items():
            denominator = float(self._denominators[name])
            values[name] = float(numerator) / denominator if denominator else float("nan")
        return values


def evaluate(
    model: nn.Module,
    task: Task,
    micro_batches: Iterable[MicroBatch],
    precision: Precision,
    device: torch.device,
) -> Evaluation:
    """Evaluates `model` on every micro-batch, once.

    Raises:
        DataError: there is no micro-batch.
    """
    running = RunningRatios()
    samples = 0
    with evaluation_mode(model), preserved_rng(device), torch.no_grad():
        for micro_batch in micro_batches:
            with precision.autocast():
                running.add(task.metric_sums(model, micro_batch.data))
            samples += micro_batch.samples
    if samples == 0:
        raise DataError(
            "the validation set is empty",
            rule="an evaluation needs at least one sample",
            remedy="check the path or the split, or leave the validation set out",
        )
    return Evaluation(running.ratios(), running.denominator(TOTAL), samples)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
