"""Rates, skips and state of the optimizer that the update uses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from surefoot.config.sections.optimizers import AdamSection, AdamWSection, SGDSection
from surefoot.core.errors import CheckpointError, ModelError, RequestError
from surefoot.optim import update as update_module
from surefoot.optim.ledger import GroupOverride, ParameterLedger, name_groups
from surefoot.optim.registry import build_optimizer
from surefoot.optim.update import SkipKind, UpdateOptimizer

TRUE = torch.tensor(True)
FALSE = torch.tensor(False)
SECTIONS = {
    "sgd": SGDSection(kind="sgd", lr=0.05, momentum=0.0, weight_decay=0.01),
    "momentum": SGDSection(kind="sgd", lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": SGDSection(kind="sgd", lr=0.05, momentum=0.9, nesterov=True),
    "adam": AdamSection(kind="adam", lr=0.01, weight_decay=0.01),
    "adamw": AdamWSection(lr=0.01, weight_decay=0.1),
}


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def built(section, model: nn.Module, *, skipping: bool = False, fused: str = "auto", **options):
    ledger = ParameterLedger.build(model, weight_decay=section.weight_decay, **options)
    section = section.model_copy(update={"fused": fused})
    return build_optimizer(section, ledger, "cpu", skipping)


def give_gradients(optimizer: UpdateOptimizer, value: float | None = None, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient if value is None else torch.full_like(gradient, value)


def everything(optimizer: UpdateOptimizer) -> list[Tensor]:
    """Every tensor that an update may change."""
    state = [
        value.clone()
        for parameter in optimizer.parameters
        for value in optimizer.optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor)
    ]
    return [p.detach().clone() for p in optimizer.parameters] + state


@pytest.mark.parametrize("fused", ["on", "off"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_non_finite_update_changes_nothing(name: str, poison: float, fused: str) -> None:
    optimizer = built(SECTIONS[name], model_of(), skipping=True, fused=fused)
    kind = SkipKind.ON_DEVICE if fused == "on" else SkipKind.ON_HOST
    assert optimizer.skips is kind
    for update in range(3):
        give_gradients(optimizer, seed=update)
        optimizer.step(TRUE.clone)
    before = everything(optimizer)
    give_gradients(optimizer, poison)
    optimizer.step(FALSE.clone)
    after = everything(optimizer)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    give_gradients(optimizer, seed=9)
    optimizer.step(TRUE.clone)
    assert not torch.equal(before[0], optimizer.parameters[0])


@pytest.mark.parametrize("name", SECTIONS)
def test_a_first_update_that_is_skipped_leaves_zero_state(name: str) -> None:
    optimizer = built(SECTIONS[name], model_of(), skipping=True)
    weights = [p.detach().clone() for p in optimizer.parameters]
    give_gradients(optimizer, float("nan"))
    optimizer.step(FALSE.clone)
    for parameter, weight in zip(optimizer.parameters, weights, strict=True):
        assert torch.equal(parameter, weight)
        for value in optimizer.optimizer.state.get(parameter, {}).values():
            assert not value.any()


@pytest.mark.parametrize("name", SECTIONS)
def test_the_flag_decides_and_not_the_gradients(name: str) -> None:
    optimizer = built(SECTIONS[name], model_of(), skipping=True)
    weight = optimizer.parameters[0].detach().clone()
    give_gradients(optimizer)
    optimizer.step(FALSE.clone)
    assert torch.equal(optimizer.parameters[0], weight)


def test_an_optimizer_that_need_not_skip_never_waits() -> None:
    optimizer = built(SECTIONS["adamw"], model_of(), skipping=False, fused="off")
    assert optimizer.skips is SkipKind.NEVER
    before = optimizer.parameters[0].detach().clone()
    give_gradients(optimizer)
    optimizer.step(FALSE.clone)
    assert not torch.equal(before, optimizer.parameters[0])


def test_damped_momentum_does_not_claim_to_skip_on_the_device() -> None:
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    name_groups(model, inner.param_groups)
    optimizer = UpdateOptimizer(inner, skipping=True)
    assert optimizer.skips is SkipKind.ON_HOST
    give_gradients(optimizer)
    optimizer.step(TRUE.clone)
    # torch's first value of a damped buffer is the gradient itself.
    buffer = inner.state[model[0].weight]["momentum_buffer"]
    assert torch.equal(buffer, model[0].weight.grad)


class MadeElsewhere(torch.optim.AdamW):
    """A subclass may do anything in its step."""


def test_a_subclass_does_not_claim_to_skip_on_the_device() -> None:
    model = model_of()
    inner = MadeElsewhere(model.parameters(), fused=True)
    name_groups(model, inner.param_groups)
    assert UpdateOptimizer(inner, skipping=True).skips is SkipKind.ON_HOST


def test_rates_are_base_times_multiplier_times_that_of_the_group() -> None:
    overrides = [GroupOverride("2.*", lr_multiplier=0.1), GroupOverride("1.*", lr_multiplier=0.0)]
    optimizer = built(SECTIONS["adamw"], model_of(), overrides=overrides)
    optimizer.set_rate(0.3)
    assert optimizer.rates() == {
        "decay": 0.01 * 0.3 * 1.0,
        "no_decay": 0.01 * 0.3 * 1.0,
        "1.* no_decay": 0.0,
        "2.* decay": 0.01 * 0.3 * 0.1,
        "2.* no_decay": 0.01 * 0.3 * 0.1,
    }
    assert all(type(group["lr"]) is float for group in optimizer.optimizer.param_groups)
    # The multiplier is of the peak, not of the last rate.
    optimizer.set_rate(1.0)
    assert optimizer.rates()["decay"] == 0.01


def test_the_rate_set_is_the_rate_used() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = built(SGDSection(kind="sgd", lr=0.5, momentum=0.0), model)
    before = model.weight.item()
    model.weight.grad = torch.ones(1, 1)
    optimizer.set_rate(0.25)
    optimizer.step(TRUE.clone)
    assert model.weight.item() == torch.tensor(before).sub(0.125).item()


def test_momentum_is_set_on_sgd_and_as_first_beta_on_adam() -> None:
    sgd = built(SECTIONS["momentum"], model_of())
    sgd.set_rate(1.0)
    assert {g["momentum"] for g in sgd.optimizer.param_groups} == {0.9}
    sgd.set_rate(1.0, momentum=0.85)
    assert {g["momentum"] for g in sgd.optimizer.param_groups} == {0.85}
    adam = built(SECTIONS["adamw"], model_of())
    adam.set_rate(1.0, momentum=0.85)
    assert {g["betas"] for g in adam.optimizer.param_groups} == {(0.85, 0.95)}


def test_a_momentum_that_is_not_there_cannot_be_scheduled() -> None:
    with pytest.raises(RequestError, match="no momentum"):
        built(SECTIONS["sgd"], model_of()).set_rate(1.0, momentum=0.9)
    model = model_of()
    inner = torch.optim.Adagrad(model.parameters())
    name_groups(model, inner.param_groups)
    with pytest.raises(RequestError, match="no momentum"):
        UpdateOptimizer(inner, skipping=False).set_rate(1.0, momentum=0.9)


def test_zero_grad_leaves_none() -> None:
    optimizer = built(SECTIONS["adamw"], model_of())
    give_gradients(optimizer)
    assert len(optimizer.gradients()) == 6
    optimizer.parameters[0].grad = None
    assert len(optimizer.gradients()) == 5
    optimizer.zero_grad()
    assert all(p.grad is None for p in optimizer.parameters)
    assert optimizer.gradients() == []


@pytest.mark.parametrize("fused", ["on", "off"])
@pytest.mark.parametrize("name", SECTIONS)
def test_state_by_name_continues_bit_for_bit(name: str, fused: str) -> None:
    first = built(SECTIONS[name], model_of(), skipping=True, fused=fused)
    for update in range(4):
        give_gradients(first, seed=update)
        first.step(TRUE.clone)
    kept = copy.deepcopy(first.state_by_name())
    weights = [p.detach().clone() for p in first.parameters]

    second = built(SECTIONS[name], model_of(seed=1), skipping=True, fused=fused)
    give_gradients(second, seed=77)
    second.step(TRUE.clone)
    with torch.no_grad():
        for parameter, weight in zip(second.parameters, weights, strict=True):
            parameter.copy_(weight)
    second.load_state_by_name(kept)
    for update in range(4, 7):
        for optimizer in (first, second):
            give_gradients(optimizer, seed=update)
            optimizer.step(TRUE.clone)
    for a, b in zip(everything(first), everything(second), strict=True):
        assert torch.equal(a, b)


def test_state_is_keyed_by_plain_names_and_holds_plain_values() -> None:
    optimizer = built(SECTIONS["adamw"], model_of())
    give_gradients(optimizer)
    optimizer.step(TRUE.clone)
    optimizer.set_rate(0.5, momentum=0.7)
    state = optimizer.state_by_name()
    assert state["kind"] == "AdamW"
    assert set(state["parameters"]) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"
    }  # fmt: skip
    assert set(state["parameters"]["0.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["shapes"]["0.weight"] == [4, 3]
    assert state["masters"] == {}
    # What the schedule sets is not state.
    assert state["groups"] == {"decay": {}, "no_decay": {}}


def test_loaded_state_is_a_copy() -> None:
    first = built(SECTIONS["momentum"], model_of())
    give_gradients(first)
    first.step(TRUE.clone)
    kept = first.state_by_name()
    second = built(SECTIONS["momentum"], model_of())
    second.load_state_by_name(kept)
    before = kept["parameters"]["0.weight"]["momentum_buffer"].clone()
    give_gradients(second, seed=3)
    second.step(TRUE.clone)
    assert torch.equal(kept["parameters"]["0.weight"]["momentum_buffer"], before)


@pytest.mark.parametrize("name", SECTIONS)
def test_state_from_before_the_first_update_forgets_what_came_after(name: str) -> None:
    optimizer = built(SECTIONS[name], model_of())
    kept = copy.deepcopy(optimizer.state_by_name())
    give_gradients(optimizer)
    optimizer.step(TRUE.clone)
    optimizer.load_state_by_name(kept)
    for parameter in optimizer.parameters:
        assert not any(v.any() for v in optimizer.optimizer.state.get(parameter, {}).values())


def test_state_moves_between_fused_and_not() -> None:
    first = built(SECTIONS["adamw"], model_of(), fused="on")
    give_gradients(first)
    first.step(TRUE.clone)
    second = built(SECTIONS["adamw"], model_of(), fused="off")
    second.load_state_by_name(copy.deepcopy(first.state_by_name()))
    give_gradients(second)
    second.step(TRUE.clone)
    assert second.optimizer.state[second.parameters[0]]["step"].item() == 2


class Counting(torch.optim.SGD):
    """Keeps a counter in its groups, as schedule-free optimizers do."""

    def __init__(self, params) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1


def test_a_counter_in_a_group_survives() -> None:
    def make() -> UpdateOptimizer:
        model = model_of()
        inner = Counting(model.parameters())
        name_groups(model, inner.param_groups)
        return UpdateOptimizer(inner, skipping=False)

    first, second = make(), make()
    for _ in range(3):
        give_gradients(first)
        first.step(TRUE.clone)
    state = first.state_by_name()
    assert state["groups"] == {"group 0": {"k": 3}}
    second.load_state_by_name(state)
    assert second.optimizer.param_groups[0]["k"] == 3


def test_state_of_another_optimizer_is_refused() -> None:
    state = built(SECTIONS["sgd"], model_of()).state_by_name()
    with pytest.raises(CheckpointError, match="state of SGD, this run uses AdamW"):
        built(SECTIONS["adamw"], model_of()).load_state_by_name(state)


def test_state_of_other_parameters_is_refused_by_name() -> None:
    state = built(SECTIONS["adamw"], model_of()).state_by_name()
    other = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(4))
    optimizer = built(SECTIONS["adamw"], other)
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_by_name(state)
    text = str(caught.value)
    assert "0.weight: checkpoint [4, 3], run [5, 3]" in text
    assert "2.weight: checkpoint [4, 2], run missing" not in text
    assert "2.weight: checkpoint [2, 4], run missing" in text


def test_groups_without_names_are_refused() -> None:
    model = model_of()
    with pytest.raises(ModelError, match="has no parameter_names"):
        UpdateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), skipping=False)


def test_a_name_in_two_places_is_refused() -> None:
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def groups(names: tuple[str, str], parameters: tuple[str, str]):
        return [
            {"params": [weight], "name": names[0], "parameter_names": [parameters[0]]},
            {"params": [bias], "name": names[1], "parameter_names": [parameters[1]]},
        ]

    with pytest.raises(ModelError, match="w is named in two places"):
        UpdateOptimizer(torch.optim.SGD(groups(("a", "b"), ("w", "w")), lr=0.1), skipping=False)
    with pytest.raises(ModelError, match="earlier group is named 'a'"):
        UpdateOptimizer(torch.optim.SGD(groups(("a", "a"), ("w", "b")), lr=0.1), skipping=False)


def test_plain_sgd_keeps_no_state_and_momentum_one_buffer_from_the_start() -> None:
    plain = built(SECTIONS["sgd"], model_of())
    assert plain.state_by_name()["parameters"] == {}
    momentum = built(SECTIONS["momentum"], model_of())
    for state in momentum.state_by_name()["parameters"].values():
        assert list(state) == ["momentum_buffer"] and not state["momentum_buffer"].any()


def test_a_state_without_buffers_starts_them_at_zero() -> None:
    state = built(SECTIONS["sgd"], model_of()).state_by_name()
    optimizer = built(SECTIONS["momentum"], model_of())
    give_gradients(optimizer)
    optimizer.step(TRUE.clone)
    optimizer.load_state_by_name(state)
    for held in optimizer.state_by_name()["parameters"].values():
        assert not held["momentum_buffer"].any()


def test_an_optimizer_made_elsewhere_has_multiplier_one_and_keeps_plain_state() -> None:
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.2)
    name_groups(model, inner.param_groups)
    optimizer = UpdateOptimizer(inner, skipping=False)
    optimizer.set_rate(0.5)
    assert optimizer.rates() == {"group 0": 0.1}
    inner.state[model[0].weight]["count"] = 3
    optimizer.load_state_by_name(copy.deepcopy(optimizer.state_by_name()))
    assert inner.state[model[0].weight] == {"count": 3}


@pytest.mark.parametrize(
    ("key", "group", "device"),
    [
        ("step", {"fused": True}, "meta"),
        ("step", {"capturable": True}, "meta"),
        ("step", {"fused": None, "capturable": False}, "cpu"),
        ("step", {}, "cpu"),
        ("exp_avg", {}, "meta"),
    ],
)
def test_the_step_count_of_a_kernel_that_is_not_fused_stays_on_the_host(
    key: str, group: dict[str, bool], device: str
) -> None:
    parameter = torch.zeros(2, device="meta")
    placed = update_module._placed(key, torch.ones(()), parameter, group)
    assert placed.device.type == device


@pytest.mark.parametrize("missing", ["name", "parameter_names"])
def test_both_kinds_of_names_are_needed(missing: str) -> None:
    group = {"params": [nn.Parameter(torch.ones(2))], "name": "a", "parameter_names": ["w"]}
    del group[missing]
    with pytest.raises(ModelError, match="has no parameter_names"):
        UpdateOptimizer(torch.optim.SGD([group], lr=0.1), skipping=False)


@pytest.mark.parametrize("fused", ["on", "off"])
@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_loaded_moments_lie_in_memory_as_their_weights(name: str, fused: str) -> None:
    """A fused kernel pairs what lies at the same place, whatever the strides say."""

    def made() -> UpdateOptimizer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
        return built(SECTIONS[name], model, fused=fused)

    def update(optimizer: UpdateOptimizer, seed: int) -> None:
        give_gradients(optimizer, seed=seed)
        weight = optimizer.parameters[0]
        weight.grad = weight.grad.to(memory_format=torch.channels_last)
        optimizer.step(TRUE.clone)

    whole, resumed = made(), made()
    update(whole, 0)
    state = copy.deepcopy(whole.state_by_name())
    for values in state["parameters"].values():
        # As they come out of a file.
        values |= {k: v.contiguous() for k, v in values.items() if isinstance(v, Tensor)}
    for mine, other in zip(resumed.parameters, whole.parameters, strict=True):
        with torch.no_grad():
            mine.copy_(other)
    resumed.load_state_by_name(state)
    update(whole, 1)
    update(resumed, 1)
    for mine, other in zip(resumed.parameters, whole.parameters, strict=True):
        assert torch.equal(mine, other)
