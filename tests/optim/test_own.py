"""An optimizer of somebody else's: over the ledger's groups, with its whole state kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.config.sections import OwnOptimizerSection
from surefoot.core.errors import ModelError, RequestError
from surefoot.optim.ledger import ParameterLedger
from surefoot.optim.registry import build_optimizer
from surefoot.optim.update import SkipKind, UpdateOptimizer

TRUE = torch.tensor(True)


class Momentum(torch.optim.Optimizer):
    """Keeps state in all the places that an optimizer may: parameters, groups and its own keys."""

    def __init__(self, groups: Any, lr: float = 1.0, beta: float = 0.9) -> None:
        super().__init__(groups, {"lr": lr, "beta": beta, "weight_decay": 0.0, "num_steps": 0})
        self.pull = 1.0
        for group in self.param_groups:
            group["growth"] = torch.ones(())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.pull *= 1.01
        for group in self.param_groups:
            group["num_steps"] += 1
            group["growth"] = group["growth"] * 1.5
            for parameter in group["params"]:
                kept = self.state[parameter]
                moved = kept.get("moved", torch.zeros_like(parameter))
                kept["moved"] = group["beta"] * moved + parameter.grad
                scale = self.pull * float(group["growth"]) / group["num_steps"]
                parameter.sub_(kept["moved"] + group["weight_decay"] * parameter, alpha=group["lr"])
                parameter.mul_(1 + 1e-4 * scale)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pull": self.pull}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.pull = state.pop("pull")
        super().load_state_dict(state)


def section(**more: Any) -> OwnOptimizerSection:
    return OwnOptimizerSection(kind="given", target="tests:own", lr=0.01, **more)


def built(make: Any, model: nn.Module, *, skipping: bool = False, **more: Any) -> UpdateOptimizer:
    ledger = ParameterLedger.build(model, weight_decay=0.1)
    return build_optimizer(section(**more), ledger, "cpu", skipping, given=make)


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: UpdateOptimizer, first: int, last: int) -> None:
    for n in range(first, last):
        generator = torch.Generator().manual_seed(n)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.set_rate(1 / (n + 1))
        optimizer.step(TRUE.clone)


@pytest.mark.parametrize("make", [Momentum, lambda groups, beta=0.9: Momentum(groups, beta=beta)])
def test_it_steps_the_groups_of_the_ledger(make: Any) -> None:
    optimizer = built(make, model_of(), arguments={"beta": 0.5})
    groups = optimizer.optimizer.param_groups
    assert [group["name"] for group in groups] == ["decay", "no_decay"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [(group["lr"], group["beta"]) for group in groups] == [(0.01, 0.5)] * 2
    optimizer.set_rate(0.5)
    assert optimizer.rates() == {"decay": 0.005, "no_decay": 0.005}


@pytest.mark.parametrize("at", [1, 3])
def test_its_whole_state_is_kept(at: int) -> None:
    whole, part = model_of(), model_of()
    train(whole, built(Momentum, whole), 0, 6)
    before = built(Momentum, part)
    train(part, before, 0, at)
    state = before.state_by_name()
    assert state["further"] == {"pull": before.optimizer.pull}
    after = built(Momentum, part)
    after.load_state_by_name(state)
    train(part, after, at, 6)
    for one, other in zip(whole.parameters(), part.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_of_torch_by_its_target() -> None:
    ledger = ParameterLedger.build(model_of(), weight_decay=0.1)
    named = OwnOptimizerSection(kind="custom", target="torch.optim:RAdam", lr=0.2)
    optimizer = build_optimizer(named, ledger, "cpu", skipping=True)
    assert type(optimizer.optimizer) is torch.optim.RAdam
    # Only torch's fused kernels can skip on the device: this one waits for the flag.
    assert optimizer.skips is SkipKind.ON_HOST
    assert build_optimizer(named, ledger, "cpu", skipping=False).skips is SkipKind.NEVER


def test_groups_of_its_own_get_names() -> None:
    def by_dims(groups: Any) -> torch.optim.Optimizer:
        flat = [p for group in groups for p in group["params"]]
        return torch.optim.SGD(
            [{"params": [p for p in flat if p.dim() == dims], "lr": 0.1} for dims in (1, 2)]
        )

    optimizer = built(by_dims, model_of()).optimizer
    assert [group["name"] for group in optimizer.param_groups] == ["group 0", "group 1"]
    assert optimizer.param_groups[0]["parameter_names"] == ["0.bias", "1.bias"]


def _first_alone(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups[:1])


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (lambda groups: None, {}, "gave a NoneType"),
        (_first_alone, {}, r"steps 2 parameters, its groups hold 4[\s\S]*missing: 0.bias, 1.bias"),
        (NeedsClosure, {}, "steps with a closure"),
        (Momentum, {"beeta": 0.5}, "beeta"),
        (Momentum, {"lr": 0.5}, "write optimizer.lr"),
        (Momentum, {"weight_decay": 0.5}, "write optimizer.weight_decay"),
    ],
)
def test_what_cannot_be_used_is_refused(make: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((RequestError, ModelError), match=said):
        built(make, model_of(), arguments=arguments)


def test_one_that_was_handed_in_must_be_handed_in_again() -> None:
    with pytest.raises(RequestError, match=r"pass optimizer=\.\.\. again"):
        built(None, model_of())
