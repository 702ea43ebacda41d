"""Float32 copies of bf16 weights: no update is lost, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from surefoot.config.sections.optimizers import AdamWSection, SGDSection
from surefoot.core.errors import CheckpointError, ModelError
from surefoot.optim.ledger import ParameterLedger
from surefoot.optim.registry import build_optimizer
from surefoot.optim.update import SkipKind

TRUE = torch.tensor(True)
FALSE = torch.tensor(False)
SGD = SGDSection(kind="sgd", lr=6e-4, momentum=0.0)


def built(model: nn.Module, section=SGD, choice: str = "master"):
    ledger = ParameterLedger.build(model, weight_decay=section.weight_decay)
    return build_optimizer(section, ledger, "cpu", True, low_precision_weights=choice)


def ones(dtype: torch.dtype) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return model


def test_bf16_alone_loses_a_hundred_small_updates() -> None:
    """The hazard itself, with torch alone."""
    model = ones(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=6e-4)
    for _ in range(100):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.step()
    assert model.weight.item() == 1.0


def test_bf16_weights_are_refused_without_a_stated_choice() -> None:
    with pytest.raises(ModelError) as caught:
        built(ones(torch.bfloat16), choice="refuse")
    assert "weight" in caught.value.where and "bfloat16" in str(caught.value)


@pytest.mark.parametrize("choice", ["refuse", "master"])
def test_fp16_weights_are_refused(choice: str) -> None:
    with pytest.raises(ModelError, match="float16"):
        built(ones(torch.float16), choice=choice)


def test_float32_copies_keep_a_hundred_small_updates() -> None:
    model = ones(torch.bfloat16)
    optimizer = built(model)
    for _ in range(100):
        optimizer.zero_grad()
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.step(TRUE.clone)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == torch.tensor(0.94).bfloat16().item()


def test_the_copies_follow_a_float32_run_bit_for_bit() -> None:
    wide, narrow = ones(torch.float32), ones(torch.bfloat16)
    section = AdamWSection(lr=0.01)
    first, second = built(wide, section), built(narrow, section)
    for update in range(20):
        gradient = torch.full((1, 1), 0.5 + update / 16).bfloat16()
        wide.weight.grad, narrow.weight.grad = gradient.float(), gradient.clone()
        first.step(TRUE.clone)
        second.step(TRUE.clone)
        assert torch.equal(narrow.weight, wide.weight.bfloat16())
        assert torch.equal(second.state_by_name()["masters"]["weight"], wide.weight)


def test_moments_are_float32_and_the_kernel_fused() -> None:
    model = ones(torch.bfloat16)
    optimizer = built(model, AdamWSection())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step(TRUE.clone)
    state = optimizer.state_by_name()["parameters"]["weight"]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    assert optimizer.skips is SkipKind.ON_DEVICE


def test_only_narrow_weights_get_copies_and_gradients_go() -> None:
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.LayerNorm(2))
    optimizer = built(model, AdamWSection())
    assert set(optimizer.state_by_name()["masters"]) == {"0.weight", "0.bias"}
    assert {id(p) for p in optimizer.parameters} == {id(p) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(TRUE.clone)
    stepped = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in stepped if p.grad is not None} == {id(p) for p in model[1].parameters()}
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_skip_changes_neither_copy_nor_weight() -> None:
    model = ones(torch.bfloat16)
    optimizer = built(model)
    model.weight.grad = torch.full((1, 1), float("nan"), dtype=torch.bfloat16)
    optimizer.step(FALSE.clone)
    assert model.weight.item() == 1.0
    assert optimizer.state_by_name()["masters"]["weight"].item() == 1.0


def test_copies_survive_a_resume() -> None:
    def update(model: nn.Module, optimizer) -> None:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(TRUE.clone)

    first_model = ones(torch.bfloat16)
    first = built(first_model)
    for _ in range(3):
        update(first_model, first)
    second_model = copy.deepcopy(first_model)
    second = built(second_model)
    second.load_state_by_name(copy.deepcopy(first.state_by_name()))
    for _ in range(3):
        update(first_model, first)
        update(second_model, second)
    mine, theirs = first.state_by_name()["masters"], second.state_by_name()["masters"]
    assert torch.equal(mine["weight"], theirs["weight"])
    assert mine["weight"].item() != first_model.weight.item()


def test_a_state_without_copies_is_refused() -> None:
    state = built(ones(torch.float32)).state_by_name()
    with pytest.raises(CheckpointError, match="differ"):
        built(ones(torch.bfloat16)).load_state_by_name(state)


def test_a_narrow_weight_without_a_gradient_stays() -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = built(model, AdamWSection(lr=0.1))
    before = model.bias.detach().clone(), model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step(TRUE.clone)
    assert torch.equal(model.bias, before[0]) and not torch.equal(model.weight, before[1])
    assert "bias" not in optimizer.state_by_name()["parameters"]
