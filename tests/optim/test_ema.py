"""The average of the weights: its formula, its skips, its swap and its state."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from surefoot.core.errors import CheckpointError, ModelError, RequestError
from surefoot.optim import ema as ema_module
from surefoot.optim.ema import NoAverage, WeightEma

TRUE = torch.tensor(True)
FALSE = torch.tensor(False)


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.dtype))


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_it_follows_the_formula_in_float64(decay: float) -> None:
    model = model_of().double()
    ema = WeightEma(model, decay)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for update in range(20):
        move(model, update)
        ema.update(TRUE.clone)
        for name, parameter in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach()
    for name, average in ema.averages.items():
        torch.testing.assert_close(average, expected[name], rtol=1e-12, atol=1e-14)


def test_it_equals_torchs_average() -> None:
    model = model_of()
    ema = WeightEma(model, 0.9)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # its first call copies
    for update in range(10):
        move(model, update)
        ema.update(TRUE.clone)
        theirs.update_parameters(model)
    for name, average in ema.averages.items():
        torch.testing.assert_close(average, theirs.module.get_parameter(name), rtol=1e-6, atol=1e-7)


def test_decay_zero_is_the_last_weights() -> None:
    model = model_of()
    ema = WeightEma(model, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.round())
    ema.update(TRUE.clone)
    for name, average in ema.averages.items():
        torch.testing.assert_close(average, model.get_parameter(name), rtol=0, atol=1e-6)


def test_a_non_finite_update_leaves_it_alone() -> None:
    model = model_of()
    ema = WeightEma(model, 0.9)
    move(model, 0)
    ema.update(TRUE.clone)
    before = {name: average.clone() for name, average in ema.averages.items()}
    move(model, 1)
    ema.update(FALSE.clone)
    assert all(torch.equal(before[name], average) for name, average in ema.averages.items())
    assert ema.num_updates.item() == 1


def test_buckets_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (1, 100, 2**26):
        monkeypatch.setattr(ema_module, "BUCKET_BYTES", size)
        model = model_of()
        ema = WeightEma(model, 0.9)
        move(model, 0)
        ema.update(TRUE.clone)
        results.append(list(ema.averages.values()))
    assert len(ema_module._buckets(results[0])) == 1
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=20), room=st.integers(1, 200))
def test_buckets_hold_each_tensor_once_and_keep_to_their_size(sizes: list[int], room: int) -> None:
    tensors = [torch.zeros(size) for size in sizes]
    previous, ema_module.BUCKET_BYTES = ema_module.BUCKET_BYTES, room
    try:
        buckets = ema_module._buckets(tensors)
    finally:
        ema_module.BUCKET_BYTES = previous
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(4 * sizes[i] for i in bucket) <= room


def test_swapped_gives_averages_inside_and_the_weights_back() -> None:
    model = model_of()
    ema = WeightEma(model, 0.9)
    move(model, 0)
    ema.update(TRUE.clone)
    raw = copy.deepcopy(model.state_dict())
    places = [p.data_ptr() for p in model.parameters()]
    averages = {name: average.clone() for name, average in ema.averages.items()}
    with ema.swapped(model):
        for name, average in averages.items():
            assert torch.equal(model.get_parameter(name), average)
            assert not torch.equal(average, raw[name])
        assert [p.data_ptr() for p in model.parameters()] == places
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, raw[name])
    assert all(torch.equal(averages[name], average) for name, average in ema.averages.items())


def test_swapped_gives_the_weights_back_after_an_exception() -> None:
    model = model_of()
    ema = WeightEma(model, 0.9)
    move(model, 0)
    raw = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), ema.swapped(model):
        raise KeyError
    assert all(torch.equal(tensor, raw[name]) for name, tensor in model.state_dict().items())
    ema.update(TRUE.clone)  # and training may go on


def test_an_update_inside_swapped_is_refused_and_it_does_not_nest() -> None:
    model = model_of()
    ema = WeightEma(model, 0.9)
    with ema.swapped(model):
        with pytest.raises(ModelError, match="updated while"):
            ema.update(TRUE.clone)
        with pytest.raises(ModelError, match="already"), ema.swapped(model):
            pass


def test_buffers_stay_those_of_the_raw_weights() -> None:
    model = model_of()
    ema = WeightEma(model, 0.9)
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    mean = model[1].running_mean.clone()
    with ema.swapped(model):
        assert torch.equal(model[1].running_mean, mean)
    assert "1.running_mean" not in ema.averages


def test_frozen_weights_are_left_out_and_tied_ones_kept_once() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert set(WeightEma(model, 0.9).averages) == {"0.weight"}
    with pytest.raises(ModelError, match="nothing to average"):
        WeightEma(model.requires_grad_(False), 0.9)


def test_bf16_weights_are_averaged_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = WeightEma(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(3):
        ema.update(TRUE.clone)
    assert ema.averages["weight"].dtype == torch.float32
    assert ema.averages["weight"].item() == pytest.approx(2.0 - 0.999**3, rel=1e-6)
    with ema.swapped(model):
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.item() == 1.0
    assert model.weight.item() == 2.0


def test_state_continues_bit_for_bit() -> None:
    model = model_of()
    first = WeightEma(model, 0.9)
    for update in range(3):
        move(model, update)
        first.update(TRUE.clone)
    other = model_of(seed=5)
    second = WeightEma(other, 0.9)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other.load_state_dict(model.state_dict())
    for update in range(3, 6):
        for m, ema in ((model, first), (other, second)):
            move(m, update)
            ema.update(TRUE.clone)
    assert second.num_updates.item() == 6
    for name, average in first.averages.items():
        assert torch.equal(average, second.averages[name])
    assert first.state_dict()["decay"] == 0.9


def test_state_of_another_model_or_kind_is_refused() -> None:
    ema = WeightEma(model_of(), 0.9)
    state = WeightEma(nn.Linear(3, 4), 0.9).state_dict()
    with pytest.raises(CheckpointError) as caught:
        ema.load_state_dict(state)
    assert "0.bias" in str(caught.value)
    with pytest.raises(CheckpointError, match="kind 'none'"):
        ema.load_state_dict(NoAverage().state_dict())
    with pytest.raises(CheckpointError, match="kind 'ema'"):
        NoAverage().load_state_dict(ema.state_dict())


def test_swapping_into_another_model_is_refused_by_name() -> None:
    ema = WeightEma(model_of(), 0.9)
    other = model_of()
    other[2].bias.requires_grad_(False)
    with pytest.raises(ModelError) as caught, ema.swapped(other):
        pass
    assert caught.value.where == "2.bias"


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(RequestError, match="decay"):
        WeightEma(model_of(), decay)


def test_no_average_leaves_the_model_alone() -> None:
    model = model_of()
    raw = copy.deepcopy(model.state_dict())
    average = NoAverage()
    average.update(TRUE.clone)
    with average.swapped(model):
        assert all(torch.equal(t, raw[n]) for n, t in model.state_dict().items())
    average.load_state_dict(average.state_dict())
