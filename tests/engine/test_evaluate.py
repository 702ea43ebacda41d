"""Evaluation is exact for any batch size and leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot.core.errors import DataError
from surefoot.data.loader import Loader
from surefoot.data.order import IN_ORDER, BatchPlan
from surefoot.data.sources.arrays import ArraySource
from surefoot.engine.evaluate import evaluate
from surefoot.numerics.precision import choose_precision
from surefoot.tasks.task import FunctionTask, MetricSums

NUM_SAMPLES = 29
FP32 = choose_precision("fp32", "cpu")
CPU = torch.device("cpu")


class Model(nn.Module):
    """Has modes, and draws random numbers also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.BatchNorm1d(3).eval()
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        torch.rand(3)
        return self.linear(self.dropout(self.frozen(self.norm(inputs))))


def loss_sum(model: nn.Module, batch: Any) -> Tensor:
    random.random()
    np.random.rand()
    return (model(batch[0]) - batch[1]).square().sum()


TASK = FunctionTask(loss_sum)


def batches(micro_batch: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    source = ArraySource(
        (torch.randn(NUM_SAMPLES, 3, generator=generator), torch.ones(NUM_SAMPLES, 1)), "points"
    )
    plan = BatchPlan(NUM_SAMPLES, micro_batch, order=IN_ORDER)
    return Loader(source, plan, weight=TASK.weight).iterate_once()


@pytest.mark.parametrize("micro_batch", [1, 4, 7, 29, 100])
def test_the_batch_size_does_not_show(micro_batch: int) -> None:
    torch.manual_seed(0)
    model = Model().double()
    task = FunctionTask(lambda m, b: loss_sum(m, (b[0].double(), b[1].double())))
    whole = evaluate(model, task, batches(NUM_SAMPLES), FP32, CPU)
    found = evaluate(model, task, batches(micro_batch), FP32, CPU)
    assert found.samples == NUM_SAMPLES and found.weight == NUM_SAMPLES
    assert found.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-13)


def traces(model: nn.Module) -> list[Any]:
    return [
        random.getstate(),
        np.random.get_state()[1].tolist(),
        np.random.get_state()[2:],
        torch.get_rng_state().tolist(),
        {name: module.training for name, module in model.named_modules()},
        {name: value.tolist() for name, value in model.state_dict().items()},
        [parameter.grad for parameter in model.parameters()],
        torch.is_grad_enabled(),
    ]


def test_no_trace_is_left() -> None:
    model = Model()
    before = traces(model)
    evaluate(model, TASK, batches(5), FP32, CPU)
    assert traces(model) == before


def test_no_trace_is_left_by_a_failing_evaluation() -> None:
    class Broken(FunctionTask):
        def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
            torch.rand(1)
            raise ValueError("metric")

    model = Model()
    before = traces(model)
    with pytest.raises(ValueError, match="metric"):
        evaluate(model, Broken(loss_sum), batches(5), FP32, CPU)
    assert traces(model) == before


def test_an_empty_set_is_an_error() -> None:
    with pytest.raises(DataError, match="empty"):
        evaluate(Model(), TASK, iter(()), FP32, CPU)
