"""From section and ledger to optimizer: fused is really on, or the reason is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.config.sections.optimizers import AdamSection, AdamWSection, SGDSection
from surefoot.core.errors import ModelError, RequestError
from surefoot.optim.ledger import ParameterLedger
from surefoot.optim.registry import build_optimizer, choose_fused, optimizer_notes
from surefoot.optim.update import SkipKind

TRUE = torch.tensor(True)
SECTIONS = {
    "sgd": SGDSection(kind="sgd", lr=0.1, momentum=0.0),
    "momentum": SGDSection(kind="sgd", lr=0.1, momentum=0.9),
    "adam": AdamSection(kind="adam"),
    "adamw": AdamWSection(),
}
KERNELS = {
    "sgd": "_fused_sgd_",
    "momentum": "_fused_sgd_",
    "adam": "_fused_adam_",
    "adamw": "_fused_adamw_",
}


class Recorder(TorchDispatchMode):
    """Writes down the name of every kernel that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def ledger_of(model: nn.Module, decay: float = 0.1) -> ParameterLedger:
    return ParameterLedger.build(model, weight_decay=decay)


def stepped(section, model: nn.Module):
    optimizer = build_optimizer(section, ledger_of(model), "cpu", skipping=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Recorder() as recorder:
        optimizer.step(TRUE.clone)
    return optimizer, recorder.called


@pytest.mark.parametrize("fused", ["auto", "on"])
@pytest.mark.parametrize("name", SECTIONS)
def test_fused_is_really_on(name: str, fused: str) -> None:
    section = SECTIONS[name].model_copy(update={"fused": fused})
    optimizer, called = stepped(section, nn.Linear(2, 2))
    assert all(group["fused"] is True for group in optimizer.optimizer.param_groups)
    assert called.count(KERNELS[name]) == 2, "one kernel a group"
    assert optimizer.kernel.startswith("fused")


@pytest.mark.parametrize("name", SECTIONS)
def test_fused_is_off_where_asked(name: str) -> None:
    section = SECTIONS[name].model_copy(update={"fused": "off"})
    optimizer, called = stepped(section, nn.Linear(2, 2))
    assert not any(group["fused"] for group in optimizer.optimizer.param_groups)
    assert all(group["foreach"] is True for group in optimizer.optimizer.param_groups)
    assert not any("fused" in kernel for kernel in called)
    assert optimizer.kernel == "foreach: optimizer.fused is off"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16])
def test_where_fused_cannot_run_auto_says_why_and_on_is_refused(dtype: torch.dtype) -> None:
    parameters = [torch.zeros(2, dtype=dtype), torch.zeros(2)]
    choice = choose_fused("auto", parameters)
    assert not choice.on and str(dtype) in choice.reason
    with pytest.raises(RequestError, match=str(dtype)):
        choose_fused("on", parameters)


def test_a_device_without_verified_kernels_is_named() -> None:
    parameters = [torch.zeros(2, device="meta")]
    assert choose_fused("auto", parameters).reason == "no verified fused kernel on meta"
    with pytest.raises(RequestError, match="no verified fused kernel on meta"):
        choose_fused("on", parameters)
    assert not choose_fused("off", parameters).on


def test_float32_and_float64_together_are_fused() -> None:
    assert choose_fused("on", [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]).on


def test_complex_parameters_train_without_the_fused_kernel() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    optimizer = build_optimizer(AdamWSection(), ledger_of(model), "cpu", skipping=True)
    assert optimizer.skips is SkipKind.ON_HOST
    assert "complex64" in optimizer.kernel


def test_hyper_parameters_arrive() -> None:
    model = nn.Linear(2, 2)
    section = AdamWSection(lr=0.003, betas=(0.8, 0.7), eps=1e-5)
    inner = build_optimizer(section, ledger_of(model, 0.05), "cpu", False).optimizer
    assert type(inner) is torch.optim.AdamW
    assert [g["weight_decay"] for g in inner.param_groups] == [0.05, 0.0]
    for group in inner.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.003, (0.8, 0.7), 1e-5)
    section = AdamSection(kind="adam", betas=(0.8, 0.7), eps=1e-5)
    inner = build_optimizer(section, ledger_of(model), "cpu", False).optimizer
    assert type(inner) is torch.optim.Adam
    assert all((g["betas"], g["eps"]) == ((0.8, 0.7), 1e-5) for g in inner.param_groups)
    section = SGDSection(kind="sgd", lr=0.1, momentum=0.8, nesterov=True)
    inner = build_optimizer(section, ledger_of(model), "cpu", False).optimizer
    assert type(inner) is torch.optim.SGD
    assert all((g["momentum"], g["nesterov"]) == (0.8, True) for g in inner.param_groups)


def test_published_defaults_stand() -> None:
    adamw, adam = AdamWSection(), AdamSection(kind="adam")
    assert (adamw.lr, adamw.betas, adamw.eps, adamw.weight_decay) == (3e-4, (0.9, 0.95), 1e-8, 0.1)
    assert (adam.betas, adam.eps) == ((0.9, 0.999), 1e-8)
    assert SGDSection(kind="sgd", lr=0.1).momentum == 0.9


def test_an_unknown_kind_is_refused() -> None:
    section = SimpleNamespace(kind="adamx", lr=0.1, fused="auto")
    with pytest.raises(RequestError, match=r"'adamx'[\s\S]*did you mean 'adam"):
        build_optimizer(section, ledger_of(nn.Linear(2, 2)), "cpu", False)


def test_parameters_elsewhere_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError) as caught:
        build_optimizer(AdamWSection(), ledger_of(model), "cpu", False)
    assert "1.weight on meta" in str(caught.value)
    assert "0.weight" not in str(caught.value)


def test_notes_name_what_is_unusual() -> None:
    model = nn.Linear(2, 2)
    assert optimizer_notes(AdamWSection(), ledger_of(model, 0.1)) == ()
    assert optimizer_notes(AdamWSection(), ledger_of(model, 0.01)) == ()
    (note,) = optimizer_notes(AdamWSection(), ledger_of(model, 0.5))
    assert "0.5" in note
    assert len(optimizer_notes(AdamWSection(), ledger_of(model, 0.001))) == 1
    (note,) = optimizer_notes(AdamWSection(betas=(0.9, 0.9999)), ledger_of(model, 0.1))
    assert "beta2 0.9999 averages over 10,000 updates" in note
    assert optimizer_notes(AdamWSection(betas=(0.9, 0.999)), ledger_of(model, 0.1)) == ()
    (note,) = optimizer_notes(AdamSection(kind="adam"), ledger_of(model, 0.1))
    assert "L2" in note
    assert optimizer_notes(AdamSection(kind="adam"), ledger_of(model, 0.0)) == ()
    assert optimizer_notes(SGDSection(kind="sgd", lr=0.1), ledger_of(model, 5e-4)) == ()
