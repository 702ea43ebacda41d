"""One rank of a run in which whatever may have an order has one of this process's own.

Sets of strings go by the process's hash seed, sets of number types by memory addresses. Started as
a process with the number of ranks and the port in its arguments; writes what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot import FunctionTask, Trainer

NUMBER_TYPES = (torch.float64, torch.int64, torch.int32, torch.int8, torch.float16, torch.uint8)
FACTORS = {"one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "five": 5.0, "six": 6.0}


class Counting(nn.Module):
    """A linear model with a counter of each number type among its state, each of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        for size, dtype in enumerate(NUMBER_TYPES, start=1):
            self.register_buffer(f"counter_{size}", torch.zeros(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for buffer in self.buffers():
                buffer.add_(1)
        return self.linear(x).squeeze(1)


def errors(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    error = errors(model, batch)
    return {name: FACTORS[name] ** 2 * error for name in set(FACTORS)}


def weights(batch: Any) -> dict[str, float]:
    return {name: FACTORS[name] * len(batch[0]) for name in set(FACTORS)}


def metric(factor: float) -> Any:
    return lambda model, batch: (factor * errors(model, batch), float(len(batch[0])))


def trained(runs: Path, num_ranks: int) -> dict[str, Any]:
    """What a run of so many ranks shows of its first window and its end."""
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    metrics = {f"times_{name}": metric(FACTORS[name]) for name in set(FACTORS)}
    model = Counting()
    settings = {
        "train": {"horizon": "3 steps", "micro_batch": 8 // num_ranks},
        "optimizer": {"lr": 0.01},
        "log": {"console": "off"},
    }
    data = (x, x.sum(1))
    task = FunctionTask(terms, weights, metrics=metrics)
    trainer = Trainer(model, data, task, validation=data, settings=settings, runs=runs)
    result = trainer.fit()
    assert result.folder is not None
    first = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[0])
    return {
        "terms": first["terms"],
        "metrics": dict(result.metrics),
        "buffers": [buffer.tolist() for buffer in model.buffers()],
        "weights": [parameter.tolist() for parameter in model.parameters()],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.write_text(json.dumps(trained(runs, int(os.environ["WORLD_SIZE"]))))
