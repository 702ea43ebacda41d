"""The whole tail of an update on a CUDA device: torch's numbers, skips, and no host sync."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from host_sync import no_host_sync
from surefoot.numerics.clipping import ClipNorm, global_norm
from surefoot.numerics.loss_scaling import DynamicLossScale
from surefoot.optim.ema import WeightEma
from surefoot.optim.ledger import ParameterLedger
from surefoot.optim.registry import build_optimizer
from surefoot.optim.update import SkipKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def section(kind: str, **numbers: object) -> SimpleNamespace:
    """An optimizer section; plain, so that a GPU machine needs no more than torch and pytest."""
    own = {name: numbers[name] for name in numbers.keys() - {"lr", "weight_decay"}}
    return SimpleNamespace(kind=kind, fused="auto", hyper_parameters=lambda: own, **numbers)


ADAM = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
SECTIONS = {
    "sgd": section("sgd", lr=0.05, momentum=0.0, nesterov=False, weight_decay=0.01),
    "momentum": section("sgd", lr=0.05, momentum=0.9, nesterov=False, weight_decay=0.01),
    "nesterov": section("sgd", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.0),
    "adam": section("adam", **ADAM, weight_decay=0.01),
    "adamw": section("adamw", **ADAM, weight_decay=0.1),
}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 3))
    return model.to("cuda", dtype)


def built(chosen, model: nn.Module, choice: str = "refuse"):
    ledger = ParameterLedger.build(model, weight_decay=chosen.weight_decay)
    return build_optimizer(chosen, ledger, "cuda", True, low_precision_weights=choice)


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator, device="cuda")
        parameter.grad = gradient.to(parameter.dtype)


def torch_optimizer(chosen, model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    options = {"lr": chosen.lr, "weight_decay": chosen.weight_decay, "fused": True}
    if chosen.kind == "sgd":
        options |= {"momentum": chosen.momentum, "nesterov": chosen.nesterov}
        return torch.optim.SGD(groups, **options)
    kind = torch.optim.AdamW if chosen.kind == "adamw" else torch.optim.Adam
    return kind(groups, betas=chosen.betas, eps=chosen.eps, **options)


@pytest.mark.parametrize("name", SECTIONS)
def test_fifty_updates_equal_torch_with_no_host_sync(name: str) -> None:
    chosen = SECTIONS[name]
    ours, theirs = model_of(), model_of()
    optimizer, reference = built(chosen, ours), torch_optimizer(chosen, theirs)
    assert optimizer.skips is SkipKind.ON_DEVICE
    clip, ema, scale = ClipNorm(1.0), WeightEma(ours, 0.9), DynamicLossScale(device="cuda")
    for update in range(50):
        give_gradients(ours, update)
        for parameter in ours.parameters():
            parameter.grad *= 2.0**16
        give_gradients(theirs, update)
        with no_host_sync():
            gradients = optimizer.gradients()
            scale.unscale_(gradients)
            norm = global_norm(gradients)
            finite = torch.isfinite(norm)
            clip(gradients, norm)
            optimizer.set_rate(1.0 / (update + 1))
            optimizer.step(finite.clone, known=True if update % 2 else None)
            scale.update(finite.clone)
            ema.update(finite.clone)
            optimizer.zero_grad()
        parameters = [p for group in reference.param_groups for p in group["params"]]
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        for group in reference.param_groups:
            group["lr"] = chosen.lr * (1.0 / (update + 1))
        reference.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)
    assert ema.num_updates.item() == 50 and scale.value.item() == 2.0**16


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_non_finite_update_changes_nothing(name: str, first: bool) -> None:
    model = model_of()
    optimizer = built(SECTIONS[name], model)
    ema, scale = WeightEma(model, 0.9), DynamicLossScale(device="cuda")
    if not first:
        give_gradients(model, 0)
        optimizer.step(torch.tensor(True, device="cuda").clone)
    weights = [p.detach().clone() for p in model.parameters()]
    state = [
        {key: value.clone() for key, value in optimizer.optimizer.state.get(p, {}).items()}
        for p in optimizer.parameters
    ]
    averages = [a.clone() for a in ema.averages.values()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    with no_host_sync():
        finite = torch.isfinite(global_norm(optimizer.gradients()))
        optimizer.step(finite.clone)
        scale.update(finite.clone)
        ema.update(finite.clone)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    for parameter, before in zip(optimizer.parameters, state, strict=True):
        for key, value in optimizer.optimizer.state.get(parameter, {}).items():
            assert torch.equal(value, before.get(key, torch.zeros_like(value)))
    assert all(torch.equal(a, b) for a, b in zip(averages, ema.averages.values(), strict=True))
    assert scale.value.item() == 2.0**15


def test_narrow_gradients_are_measured_in_float32_and_clipped() -> None:
    gradients = [torch.ones(100_000, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    with no_host_sync():
        norm = global_norm(gradients)
        ClipNorm(1.0)(gradients, norm)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(300_000**0.5, rel=1e-5)
    assert gradients[0][0].item() == pytest.approx(300_000**-0.5, rel=0.01)


def test_float32_copies_follow_a_float32_run() -> None:
    chosen = SECTIONS["adamw"]
    narrow = model_of(torch.bfloat16)
    wide = model_of(torch.bfloat16).float()
    first, second = built(chosen, wide), built(chosen, narrow, "master")
    flag = torch.tensor(True, device="cuda")
    for update in range(10):
        give_gradients(narrow, update)
        for mine, other in zip(wide.parameters(), narrow.parameters(), strict=True):
            mine.grad = other.grad.float()
        first.step(flag.clone)
        with no_host_sync():
            second.step(flag.clone)
    for mine, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(mine.bfloat16(), other)


def test_the_average_of_bf16_weights_is_float32() -> None:
    model = nn.Linear(1, 1, bias=False, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = WeightEma(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(3):
        ema.update(torch.tensor(True, device="cuda").clone)
    assert ema.averages["weight"].item() == pytest.approx(2.0 - 0.999**3, rel=1e-6)
    with ema.swapped(model):
        assert model.weight.item() == 1.0
    assert model.weight.item() == 2.0
