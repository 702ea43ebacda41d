"""Optimizer state between two steps: on the host, the same bits, in memory that is made once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.core.errors import RequestError
from surefoot.optim.ledger import ParameterLedger
from surefoot.optim.registry import build_optimizer
from surefoot.optim.state_on_host import check_state_on_host
from surefoot.optim.update import UpdateOptimizer

from .test_on_gpu import SECTIONS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(model: nn.Module, kind: str, device: str) -> UpdateOptimizer:
    section: Any = SECTIONS[kind]
    ledger = ParameterLedger.build(model, weight_decay=section.weight_decay)
    optimizer = build_optimizer(section, ledger, device, skipping=False)
    optimizer.set_rate(1.0)
    return optimizer


def step(model: nn.Module, optimizer: UpdateOptimizer, seed: int, is_finite: bool = True) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
    flag = torch.tensor(is_finite, device=next(model.parameters()).device)
    optimizer.step(lambda: flag)


def tensors(optimizer: UpdateOptimizer) -> dict[tuple[str, str], Tensor]:
    state = optimizer.state_by_name()["parameters"]
    return {(name, key): value for name in state for key, value in state[name].items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_the_same_bits_as_on_the_device(kind: str, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    twin = copy.deepcopy(model)
    resting, usual = made(model, kind, device), made(twin, kind, device)
    resting.keep_state_on_host()
    places: set[int] = set()
    for seed in range(5):
        step(model, resting, seed, is_finite=seed != 3)
        step(twin, usual, seed, is_finite=seed != 3)
        held = {k: v for k, v in tensors(resting).items() if v.numel() > 1}
        assert held
        assert all(value.device.type == "cpu" for value in held.values())
        places |= {value.data_ptr() for value in held.values()}
    assert len(places) == len(held)
    expected = tensors(usual)
    for key, value in tensors(resting).items():
        assert torch.equal(value.cpu(), expected[key].cpu()), key
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("device", DEVICES)
def test_it_goes_on_from_a_checkpoint(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    optimizer = made(model, "adamw", device)
    optimizer.keep_state_on_host()
    for seed in range(3):
        step(model, optimizer, seed)
    weights = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(optimizer.state_by_name())
    step(model, optimizer, 3)
    expected = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    optimizer.load_state_by_name(saved)
    step(model, optimizer, 3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_what_cannot_rest_there_is_refused() -> None:
    with pytest.raises(RequestError, match="computes on the CPU"):
        check_state_on_host(torch.device("cpu"), is_sharded=False)
    with pytest.raises(RequestError, match="distributed over ranks"):
        check_state_on_host(torch.device("cuda"), is_sharded=True)
    check_state_on_host(torch.device("cuda"), is_sharded=False)
