"""Optimizers against torch, bit for bit, and against their published formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from surefoot.config.sections.optimizers import AdamSection, AdamWSection, SGDSection
from surefoot.numerics.clipping import ClipNorm, global_norm
from surefoot.optim.ledger import ParameterLedger
from surefoot.optim.registry import build_optimizer

TRUE = torch.tensor(True)
FALSE = torch.tensor(False)

SECTIONS = {
    "sgd": SGDSection(kind="sgd", lr=0.05, momentum=0.0, weight_decay=0.01),
    "momentum": SGDSection(kind="sgd", lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": SGDSection(kind="sgd", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": AdamSection(kind="adam", lr=0.01, weight_decay=0.01),
    "adamw": AdamWSection(lr=0.01, weight_decay=0.1),
}


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).to(dtype)


def built(section, model, *, skipping=False):
    ledger = ParameterLedger.build(model, weight_decay=section.weight_decay)
    return build_optimizer(section, ledger, "cpu", skipping)


def torch_groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]


def torch_optimizer(section, model: nn.Module) -> torch.optim.Optimizer:
    groups = torch_groups(model, section.weight_decay)
    if section.kind == "sgd":
        return torch.optim.SGD(
            groups, lr=section.lr, momentum=section.momentum, nesterov=section.nesterov, fused=True
        )
    kind = torch.optim.AdamW if section.kind == "adamw" else torch.optim.Adam
    return kind(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def backward(model: nn.Module, update: int) -> None:
    generator = torch.Generator().manual_seed(update)
    ids = torch.randint(11, (4, 5), generator=generator)
    model(ids).square().sum().backward()


def multiplier(update: int) -> float:
    return min(1.0, (update + 1) / 5) * (0.5 + 0.5 * math.cos(update / 50))


@pytest.mark.parametrize("name", SECTIONS)
def test_fifty_updates_equal_torch_bit_for_bit(name: str) -> None:
    section = SECTIONS[name]
    ours, theirs = small_model(), small_model()
    optimizer, reference = built(section, ours), torch_optimizer(section, theirs)
    clip = ClipNorm(1.0)
    for update in range(50):
        optimizer.zero_grad()
        backward(ours, update)
        gradients = optimizer.gradients()
        norm = global_norm(gradients)
        clip(gradients, norm)
        optimizer.set_rate(multiplier(update))
        optimizer.step(torch.isfinite(norm).clone)

        reference.zero_grad()
        backward(theirs, update)
        parameters = [p for group in reference.param_groups for p in group["params"]]
        reference_norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in reference.param_groups:
            group["lr"] = section.lr * multiplier(update)
        reference.step()

        assert torch.equal(norm, reference_norm)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", SECTIONS)
def test_skips_in_between_leave_the_course_of_torch(name: str) -> None:
    """A skipped update is as if it had never been, for weights, moments and bias correction."""
    section = SECTIONS[name]
    ours, theirs = small_model(), small_model()
    optimizer, reference = built(section, ours, skipping=True), torch_optimizer(section, theirs)
    for update in range(12):
        optimizer.zero_grad()
        backward(ours, update)
        if update % 3 == 0:
            for gradient in optimizer.gradients():
                gradient.fill_(float("nan") if update % 2 else float("inf"))
            optimizer.step(FALSE.clone)
            continue
        optimizer.step(TRUE.clone)
        reference.zero_grad()
        backward(theirs, update)
        reference.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)


class Formula:
    """The published update of one tensor, in float64, written out."""

    def __init__(self, section, weight: Tensor, decay: float) -> None:
        self.section, self.weight, self.decay = section, weight.clone(), decay
        self.v = torch.zeros_like(weight)
        self.m = torch.zeros_like(weight)
        self.t = 0

    def step(self, g: Tensor, lr: float) -> None:
        s = self.section
        self.t += 1
        if s.kind == "sgd":
            g = g + self.decay * self.weight
            self.v = s.momentum * self.v + g
            self.weight = self.weight - lr * (g + s.momentum * self.v if s.nesterov else self.v)
            return
        beta1, beta2 = s.betas
        if s.kind == "adamw":
            self.weight = self.weight - lr * self.decay * self.weight
        else:
            g = g + self.decay * self.weight
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        m_hat = self.m / (1 - beta1**self.t)
        v_hat = self.v / (1 - beta2**self.t)
        self.weight = self.weight - lr * m_hat / (v_hat.sqrt() + s.eps)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_hundred_updates_follow_the_formula_in_float64(name: str) -> None:
    section = SECTIONS[name]
    model = small_model(torch.float64)
    optimizer = built(section, model)
    formulas = {
        row.name: Formula(section, parameter.detach(), row.weight_decay)
        for row, parameter in zip(
            ParameterLedger.build(model, weight_decay=section.weight_decay).rows,
            model.parameters(),
            strict=True,
        )
    }
    for update in range(100):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(update)
        for name_, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = gradient
            formulas[name_].step(gradient, section.lr * multiplier(update))
        optimizer.set_rate(multiplier(update))
        optimizer.step(TRUE.clone)
    for name_, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), formulas[name_].weight, rtol=1e-12, atol=0)


def test_plain_sgd_is_weight_minus_rate_times_gradient() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = built(SGDSection(kind="sgd", lr=0.5, momentum=0.0), model)
    model.weight.grad = torch.tensor([[0.25]])
    optimizer.step(TRUE.clone)
    assert model.weight.item() == 1.0 - 0.5 * 0.25


def test_adamw_without_gradient_shrinks_by_one_minus_rate_times_decay() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = built(AdamWSection(lr=0.5, weight_decay=0.25), model)
    for update, scale in enumerate((1.0, 0.5)):
        before = model.weight.item()
        model.weight.grad = torch.zeros(1, 1, dtype=torch.float64)
        optimizer.set_rate(scale)
        optimizer.step(TRUE.clone)
        # The decay follows the current rate, not the peak.
        assert model.weight.item() == before * (1 - 0.5 * scale * 0.25), update


def test_adam_with_l2_is_not_adamw() -> None:
    """Where second moments differ, L2 through Adam pulls less on the noisy weight."""
    pulls = {}
    for section in (
        AdamSection(kind="adam", lr=0.01, weight_decay=0.1),
        AdamWSection(lr=0.01, betas=(0.9, 0.999), weight_decay=0.1),
    ):
        model = nn.Linear(2, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = built(section, model)
        for update in range(40):
            sign = 1.0 if update % 2 else -1.0
            model.weight.grad = torch.tensor([[sign * 10.0, sign * 0.01]], dtype=torch.float64)
            optimizer.step(TRUE.clone)
        pulls[section.kind] = (1.0 - model.weight.detach()).flatten().tolist()
    loud, quiet = pulls["adam"]
    assert quiet > 5 * loud
    loud, quiet = pulls["adamw"]
    assert quiet == pytest.approx(loud, rel=0.2)


def test_adam_needs_fewer_steps_than_sgd_on_an_elongated_quadratic() -> None:
    curvature = torch.tensor([[100.0, 1.0, 0.01]])

    def steps(section) -> int:
        model = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = built(section, model)
        for step in range(3000):
            optimizer.zero_grad()
            loss = 0.5 * (curvature * model.weight.square()).sum()
            if loss.item() < 1e-4:
                return step
            loss.backward()
            optimizer.step(TRUE.clone)
        return 3000

    adam = steps(AdamSection(kind="adam", lr=0.05))
    # 0.019 is just below 2 / 100, where plain SGD starts to diverge.
    sgd = steps(SGDSection(kind="sgd", lr=0.019, momentum=0.0))
    assert adam < sgd / 10
