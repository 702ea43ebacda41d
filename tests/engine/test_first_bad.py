"""The module that made an update go wrong is named, and looking for it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.data.batch import MicroBatch
from surefoot.data.order import Cursor
from surefoot.engine.first_bad import FirstBad, described
from surefoot.engine.passes import PlainPass
from surefoot.engine.window import Window, gather_window
from surefoot.numerics.loss_scaling import NoLossScale
from surefoot.numerics.precision import choose_precision
from surefoot.tasks.task import FunctionTask


class Root(nn.Module):
    """Its slope at 0 is infinite."""

    def forward(self, value: Tensor) -> Tensor:
        return value.abs().sqrt()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.root = Root()
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(3, 1)

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.last(self.dropout(self.root(self.norm(self.first(value)))))
        return output


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).sum()


def window(value: Tensor) -> Window:
    return gather_window([MicroBatch((value,), {"loss": 4.0}, 4, (0, 1, 2, 3), Cursor(), True)])


def find(model: nn.Module, value: Tensor) -> dict[str, Any]:
    task, cpu = FunctionTask(loss), torch.device("cpu")
    run_pass = PlainPass(model, task, choose_precision("fp32", cpu))
    finder = FirstBad(model, run_pass, NoLossScale(), cpu)
    return finder.find(window(value), {"loss": 4.0})


def test_the_first_bad_output_is_named_and_whether_its_input_was_to_blame() -> None:
    model = Net()
    found = find(model, torch.full((4, 2), torch.nan))
    assert found["forward"] == {"module": "first", "kind": "Linear", "finite_inputs": False}
    assert "as was its input" in described(found)
    with torch.no_grad():
        model.last.weight[0, 0] = torch.inf
    found = find(model, torch.randn(4, 2))
    assert found["weights"] == ["last.weight"] and "last.weight" in described(found)
    assert found["forward"]["module"] == "last" and found["forward"]["finite_inputs"]


def test_a_gradient_that_overflows_is_traced_to_its_module() -> None:
    model = Net()
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.zero_()
    model.dropout.p = 0.0
    found = find(model, torch.randn(4, 2))
    assert found["forward"] is None
    assert found["backward"] == {"module": "norm", "kind": "BatchNorm1d"}
    assert "first.weight" in found["gradients"] and "forward is finite" in described(found)


def test_looking_changes_nothing() -> None:
    model = Net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    find(model, torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in model.modules())


def test_finite_when_run_again() -> None:
    found = find(Net(), torch.randn(4, 2))
    assert found["weights"] == found["gradients"] == [] and found["backward"] is None
    assert "chance" in described(found)


def test_a_pass_that_raises_is_told() -> None:
    class Broken(Net):
        def forward(self, value: Tensor) -> Tensor:
            raise ArithmeticError("gone")

    assert find(Broken(), torch.ones(4, 2))["error"] == "ArithmeticError: gone"


@pytest.mark.parametrize("only", [["last.bias"]])
def test_gradients_of_weights_alone(only: list[str]) -> None:
    found = {"weights": [], "forward": None, "backward": None, "gradients": only}
    assert "last.bias" in described(found)
