"""Loss scales: the sequence of torch's GradScaler, and no change to finite training."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from surefoot.config.sections.optimizers import SGDSection
from surefoot.core.errors import CheckpointError, RequestError
from surefoot.numerics.clipping import global_norm
from surefoot.numerics.loss_scaling import DynamicLossScale, NoLossScale, StaticLossScale
from surefoot.numerics.precision import choose_precision
from surefoot.optim.ledger import ParameterLedger
from surefoot.optim.registry import build_optimizer


@settings(deadline=None, max_examples=50)
@given(
    finite=st.lists(st.booleans(), min_size=1, max_size=40),
    interval=st.integers(1, 5),
    initial=st.sampled_from([1.0, 2.0**16, 2.0**126, 2.0**-140]),
    factors=st.sampled_from([(2.0, 0.5), (4.0, 0.25), (1.5, 0.75)]),
)
def test_the_sequence_is_that_of_grad_scaler(
    finite: list[bool], interval: int, initial: float, factors: tuple[float, float]
) -> None:
    growth, backoff = factors
    ours = DynamicLossScale(initial, growth, backoff, interval)
    theirs = torch.amp.GradScaler(
        "cpu",
        init_scale=initial,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )
    parameter = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs.scale(torch.ones(()))  # GradScaler makes its scale at first use
    for is_finite in finite:
        parameter.grad = torch.tensor(1.0 if is_finite else float("inf"))
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(is_finite).clone)
        assert ours.value.item() == theirs.get_scale()


def test_it_halves_on_overflow_and_grows_after_the_interval() -> None:
    scale = DynamicLossScale(1024.0, growth_interval=3)
    seen = []
    for is_finite in (True, True, False, True, True, True, True):
        scale.update(torch.tensor(is_finite).clone)
        seen.append(scale.value.item())
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024]


def test_a_value_handed_out_is_never_changed() -> None:
    scale = DynamicLossScale(1024.0)
    used = scale.value
    scale.update(torch.tensor(False).clone)
    assert used.item() == 1024.0 and scale.value.item() == 512.0


@pytest.mark.parametrize("value", [1024.0, 65536.0, 1000.0])
@pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])
def test_unscale_undoes_scale(kind, value: float) -> None:
    scale = kind(value)
    parameter = nn.Parameter(torch.tensor([0.3, -7.0]))
    loss = parameter.square().sum()
    scale.scale(loss).backward()
    assert torch.equal(parameter.grad, 2 * parameter.detach() * value) or value == 1000.0
    scale.unscale_([parameter.grad])
    torch.testing.assert_close(parameter.grad, 2 * parameter.detach(), rtol=3e-7, atol=0)


def test_a_power_of_two_is_exact() -> None:
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(0))
    scaled = gradient * 2.0**16
    DynamicLossScale().unscale_([scaled])
    assert torch.equal(scaled, gradient)


def test_unscale_takes_no_gradients_at_all() -> None:
    DynamicLossScale().unscale_([])
    StaticLossScale(2.0).unscale_([])


def test_a_static_scale_stays() -> None:
    scale = StaticLossScale(1024.0)
    for is_finite in (True, False):
        scale.update(torch.tensor(is_finite).clone)
        assert scale.value == 1024.0


def test_no_scale_is_one_and_does_nothing() -> None:
    scale = NoLossScale()
    loss, gradient = torch.tensor(3.0), torch.tensor([2.0])
    assert scale.scale(loss) is loss
    scale.unscale_([gradient])
    scale.update(torch.tensor(False).clone)
    assert gradient.item() == 2.0 and scale.value == 1.0


def test_fp16_gradients_are_refused() -> None:
    for scale in (StaticLossScale(2.0), DynamicLossScale()):
        with pytest.raises(RequestError, match="float16"):
            scale.unscale_([torch.ones(2), torch.ones(3, dtype=torch.float16)])


def test_state_continues_the_sequence() -> None:
    first = DynamicLossScale(1024.0, growth_interval=3)
    for is_finite in (False, True, True):
        first.update(torch.tensor(is_finite).clone)
    second = DynamicLossScale(1.0, growth_interval=3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(2):
        first.update(torch.tensor(True).clone)
        second.update(torch.tensor(True).clone)
        assert first.value.item() == second.value.item()
    assert second.value.item() == 1024.0


def test_loaded_state_is_a_copy() -> None:
    state = DynamicLossScale(1024.0).state_dict()
    scale = DynamicLossScale()
    scale.load_state_dict(state)
    scale.update(torch.tensor(True).clone)
    assert state["good_updates"].item() == 0 and state["value"].item() == 1024.0
    assert scale.value.data_ptr() != state["value"].data_ptr()


def test_state_of_another_kind_is_refused() -> None:
    scales = [NoLossScale(), StaticLossScale(2.0), DynamicLossScale()]
    for holder in scales:
        for giver in scales:
            if type(holder) is type(giver):
                holder.load_state_dict(giver.state_dict())
            else:
                with pytest.raises(CheckpointError):
                    holder.load_state_dict(giver.state_dict())


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_values_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(RequestError):
        StaticLossScale(value)
    with pytest.raises(RequestError):
        DynamicLossScale(value)


@pytest.mark.parametrize(
    "options", [{"growth": 1.0}, {"backoff": 1.0}, {"backoff": 0.0}, {"growth_interval": 0}]
)
def test_factors_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        DynamicLossScale(**options)


def test_an_fp16_run_with_a_forced_overflow_recovers() -> None:
    """Scale, skip, halve, go on: the weights move only in finite updates, and the loss falls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    precision = choose_precision("fp16", "cpu")
    # So large that the scaled loss overflows fp16's 65504 in backward.
    scale = DynamicLossScale(2.0**24, growth_interval=1000)
    section = SGDSection(kind="sgd", lr=0.05, momentum=0.9)
    ledger = ParameterLedger.build(model, weight_decay=0.0)
    optimizer = build_optimizer(section, ledger, "cpu", skipping=True)
    inputs = torch.randn(32, 4)
    target = inputs.sum(1, keepdim=True)
    losses, scales, moved = [], [], []
    for _ in range(60):
        optimizer.zero_grad()
        with precision.autocast():
            loss = (model(inputs).float() - target).square().mean()
        scale.scale(loss).backward()
        gradients = optimizer.gradients()
        assert all(g.dtype == torch.float32 for g in gradients)
        scale.unscale_(gradients)
        norm = global_norm(gradients)
        finite = torch.isfinite(norm)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step(finite.clone)
        moved.append(
            any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        )
        scales.append(scale.value.item())
        scale.update(finite.clone)
        losses.append(loss.item())
        assert moved[-1] == bool(finite)
    assert moved[0] is False, "the first update overflows"
    assert moved[-1] is True
    skipped = moved.count(False)
    assert scales[-1] == 2.0**24 / 2**skipped
    assert losses[-1] < losses[0] / 5


def test_the_norm_after_unscaling_is_that_of_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    inputs, target = torch.randn(64, 8), torch.randn(64, 1)
    norms = {}
    for name in ("fp32", "bf16", "fp16"):
        precision = choose_precision(name, "cpu")
        scale = DynamicLossScale(1024.0) if precision.needs_loss_scale else NoLossScale()
        model.zero_grad()
        with precision.autocast():
            loss = (model(inputs).float() - target).square().mean()
        scale.scale(loss).backward()
        gradients = [p.grad for p in model.parameters()]
        scale.unscale_(gradients)
        norms[name] = global_norm(gradients).item()
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.01)
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=0.02)


def test_the_defaults_are_those_of_grad_scaler() -> None:
    ours, theirs = DynamicLossScale(), torch.amp.GradScaler("cpu")
    assert ours.value.item() == theirs.get_scale() == 2.0**16
    assert ours.growth == theirs.get_growth_factor()
    assert ours.backoff == theirs.get_backoff_factor()
    assert ours.growth_interval == theirs.get_growth_interval()
