"""A source, a task and a metric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LargerOfTwo:
    """Two random numbers, and which of them is the larger one; a map-style dataset."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(num_samples, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        row = self.rows[index]
        return row, 1.0 if row[0] > row[1] else -1.0


def larger_of_two(num_samples: int = 40) -> LargerOfTwo:
    """Two random numbers, and which of them is the larger one."""
    return LargerOfTwo(num_samples)


class MarginTask:
    """Hinge loss of the first output, counted in samples."""

    unit = "samples"
    deciding_metric = ("loss", "min")

    def __init__(self, margin: float = 1.0) -> None:
        self.margin = margin

    def weight(self, batch: Any) -> float:
        return float(len(batch[1]))

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        rows, signs = batch
        return torch.relu(self.margin - signs * model(rows)[:, 0]).sum()

    def metric_sums(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        return {"loss": (self.loss_sum(model, batch), self.weight(batch))}


def mean_output(model: nn.Module, batch: Any, power: float = 1.0) -> tuple[Tensor, float]:
    """Mean size of the outputs."""
    outputs = model(batch[0]).abs() ** power
    return outputs.sum(), float(outputs.numel())
