"""How the losses of a window add up, and which loss terms are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.data.batch import MicroBatch
from surefoot.data.order import Cursor
from surefoot.engine.passes import RESERVED, PlainPass, RankReduction
from surefoot.numerics.loss_scaling import NoLossScale
from surefoot.numerics.precision import choose_precision
from surefoot.tasks.task import FunctionTask
from surefoot.train_step import TrainStep


def micro_batch(value: float, samples: int = 2) -> MicroBatch:
    data = torch.full((2, 1), value)
    return MicroBatch(data, {"loss": 2.0}, samples, (), Cursor(), False)


def two_terms(first: str, second: str) -> FunctionTask:
    def loss(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        output = model(batch)
        return {first: output.sum(), second: output.square().sum()}

    return FunctionTask(loss, weight_fn=lambda batch: {first: 2.0, second: 4.0})


def plain_pass(task: FunctionTask, model: nn.Module) -> PlainPass:
    return PlainPass(model, task, choose_precision("fp32", "cpu"))


def one_weight() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def test_terms_are_divided_each_by_its_own_weight_and_added() -> None:
    model = one_weight()
    losses = plain_pass(two_terms("a", "b"), model)(
        [micro_batch(1.0), micro_batch(3.0)], {"a": 2.0, "b": 4.0}, NoLossScale()
    )
    assert {name: float(value) for name, value in losses.items()} == {
        "loss": (2 + 6) / 2 + (2 + 18) / 4, "a": (2 + 6) / 2, "b": (2 + 18) / 4,
    }  # fmt: skip
    # d/dw of sum(w x) / 2 + sum(w^2 x^2) / 4 at w = 1.
    assert float(model.weight.grad) == (2 + 6) / 2 + 2 * (2 + 18) / 4


@pytest.mark.parametrize("name", [*sorted(RESERVED), "detail.dead_units"])
def test_a_term_named_like_a_number_of_the_log_is_refused(name: str) -> None:
    step = TrainStep(
        one_weight(), two_terms("loss", name), settings={"train": {"horizon": "2 steps"}}
    )
    with pytest.raises(ModelError, match=f"may not be called '{name}'"):
        step(torch.ones(2, 1))


def test_every_number_beside_the_terms_is_reserved() -> None:
    settings = {
        "train": {"horizon": "2 steps"},
        "log": {"weight_norm_every": "1 steps", "details_every": "1 steps"},
    }
    step = TrainStep(one_weight(), two_terms("a", "b"), settings=settings)
    step(torch.ones(2, 1))
    report = step.settle()
    assert report is not None and report.terms.keys() == {"a", "b"}
    assert report.details and report.weight_norm is not None


class Joint:
    """Ranks that are seen from one of them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        self.events.append("last" if is_last else "first")
        yield

    def finish(self) -> None:
        self.events.append("finish")

    def share(self) -> None:
        self.events.append("share")

    def double(self, tensor: Tensor) -> Tensor:
        self.events.append("sum")
        return tensor.mul_(2)


def test_a_filler_is_run_with_the_others_and_counts_for_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), one_weight())
    joint = Joint()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().sum()

    reduction = RankReduction(model, joint, joint.share, joint.double)
    run = PlainPass(model, FunctionTask(loss), choose_precision("fp32", "cpu"), reduction)
    denominators: Mapping[str, float] = {"loss": 4.0}
    real = MicroBatch(torch.tensor([[0.0], [2.0]]), {"loss": 2.0}, 2, (), Cursor(), False)
    losses = run([real, micro_batch(5.0, samples=0)], denominators, NoLossScale())
    assert joint.events == ["first", "last", "finish", "share", "sum"]
    # Normalised to -1 and 1: a sum of 2 over 4, on two ranks alike; the filler adds nothing.
    assert float(losses["loss"]) == pytest.approx(1.0, rel=1e-4)
    assert float(model[0].running_mean) == pytest.approx(0.1)
    assert int(model[0].num_batches_tracked) == 1
