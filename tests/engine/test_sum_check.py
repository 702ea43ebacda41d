"""A loss that is a mean is refused before the first update; whatever else it is passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.engine.sum_check import refuse_a_mean
from surefoot.tasks.task import FunctionTask
from surefoot.train_step import TrainStep
from surefoot.trainer import Trainer

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "train": {"horizon": "2 steps", "micro_batch": 4},
    "log": {"console": "off"},
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def batch_of(size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, generator=generator), torch.ones(size, 1)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def total(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    features = model(batch[0])
    labels = torch.arange(len(features))
    return F.cross_entropy(features @ features.T, labels, reduction="sum")


def fails(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("not on so few")


@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_mean_is_refused_with_both_numbers(size: int) -> None:
    with pytest.raises(ModelError, match="is a mean, not a sum") as caught:
        refuse_a_mean(model_of(), FunctionTask(mean), batch_of(size), CPU)
    assert caught.value.where == "mean" and "reduction" in caught.value.remedy


@pytest.mark.parametrize("loss", [total, contrastive, fails, lambda m, b: 0.0 * total(m, b)])
def test_everything_else_passes(loss: Any) -> None:
    refuse_a_mean(model_of(), FunctionTask(loss), batch_of(), CPU)


def test_the_term_that_is_a_mean_is_named() -> None:
    task = FunctionTask(lambda m, b: {"fit": total(m, b), "prior": mean(m, b)})
    with pytest.raises(ModelError, match="term 'prior'"):
        refuse_a_mean(model_of(), task, batch_of(), CPU)


def test_no_trace_is_left() -> None:
    model = model_of()
    before = (torch.get_rng_state().tolist(), [t.tolist() for t in model.state_dict().values()])
    refuse_a_mean(model, FunctionTask(total), batch_of(), CPU)
    after = (torch.get_rng_state().tolist(), [t.tolist() for t in model.state_dict().values()])
    assert before == after and all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_trainer_and_step_ask_before_the_first_update(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a mean"):
        Trainer(model_of(), batch_of(), mean, settings=SETTINGS, runs=tmp_path).fit()
    assert not list(tmp_path.iterdir()), "nothing was started"
    step = TrainStep(model_of(), mean, settings=SETTINGS)
    with pytest.raises(ModelError, match="is a mean"):
        step(batch_of())
