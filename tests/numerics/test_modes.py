"""Modes: each submodule has its own back, and what is mode-sensitive is known."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from surefoot.core.errors import ModelError
from surefoot.numerics.modes import (
    ModeWatch,
    check_training_modes,
    evaluation_mode,
    mode_sensitive_modules,
    preserved_modes,
    training_modes,
)


def model_with_frozen_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 2))
    model[1].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_a_frozen_norm_stays_frozen_after_an_evaluation() -> None:
    model = model_with_frozen_norm()
    before = modes(model)
    assert before == [True, True, False, True, True]
    with evaluation_mode(model):
        assert not any(modes(model))
    assert modes(model) == before


def test_modes_come_back_after_an_exception() -> None:
    model = model_with_frozen_norm()
    before = modes(model)
    with pytest.raises(KeyError), evaluation_mode(model):
        raise KeyError
    assert modes(model) == before


def test_preserved_modes_undoes_whatever_happens_inside() -> None:
    model = model_with_frozen_norm()
    before = modes(model)
    with preserved_modes(model):
        assert modes(model) == before
        model.train()
        model[3].eval()
    assert modes(model) == before


def test_a_model_that_was_in_eval_stays_in_eval() -> None:
    model = model_with_frozen_norm().eval()
    with evaluation_mode(model):
        pass
    assert not any(modes(model))


def test_a_module_with_a_train_of_its_own_is_put_back_too() -> None:
    class Stubborn(nn.Module):
        """Ignores train(True), as some frozen backbones do."""

        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    model = nn.Sequential(Stubborn())
    model[0].training = True
    with evaluation_mode(model):
        assert model[0].training is False
    assert model[0].training is True


def test_a_compiled_model_is_put_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.compile(model_with_frozen_norm())
    before = modes(model)
    with evaluation_mode(model):
        assert not any(modes(model))
    assert modes(model) == before


def test_modes_and_gradients_are_independent() -> None:
    model = model_with_frozen_norm()
    with evaluation_mode(model):
        assert model(torch.ones(2, 2)).requires_grad


class ReadsMode(nn.Module):
    def forward(self, x):
        return x * 2 if self.training else x


class ReadsNothing(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.1), nn.Dropout2d(0.1), nn.AlphaDropout(0.1), nn.BatchNorm1d(2),
        nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2, track_running_stats=True),
        nn.RReLU(), nn.MultiheadAttention(2, 1, dropout=0.1), nn.LSTM(2, 2, 2, dropout=0.1),
        nn.GRU(2, 2, 2, dropout=0.1), ReadsMode(),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_modules_that_depend_on_their_mode(module: nn.Module) -> None:
    (entry,) = [e for e in mode_sensitive_modules(nn.Sequential(module)) if e.name == "0"]
    assert entry.kind == type(module).__name__
    assert entry.training is True
    assert entry.in_train and entry.in_eval
    module.eval()
    assert mode_sensitive_modules(nn.Sequential(module))[0].training is False


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2), nn.LayerNorm(2), nn.RMSNorm(2), nn.GroupNorm(1, 2), nn.Conv1d(1, 1, 1),
        nn.ReLU(), nn.Dropout(0.0), nn.BatchNorm1d(2, track_running_stats=False),
        nn.InstanceNorm1d(2), nn.MultiheadAttention(2, 1), nn.LSTM(2, 2, 1), nn.LSTM(2, 2, 2),
        nn.Embedding(2, 2), ReadsNothing(), nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_modules_that_do_not(module: nn.Module) -> None:
    assert mode_sensitive_modules(nn.Sequential(module)) == []


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Dropout(0.5), torch.ones(64)),
        (nn.BatchNorm1d(2), torch.randn(8, 2, generator=torch.Generator().manual_seed(0))),
        (nn.RReLU(), -torch.ones(64)),
        (ReadsMode(), torch.ones(2)),
    ],
    ids=["Dropout", "BatchNorm1d", "RReLU", "ReadsMode"],
)
def test_the_list_tells_the_truth(module: nn.Module, inputs: torch.Tensor) -> None:
    train = module.train()(inputs)
    assert not torch.equal(train, module.eval()(inputs))


def test_a_single_recurrent_layer_drops_nothing_between_layers() -> None:
    layer = nn.LSTM(2, 2, 1)
    layer.dropout = 0.5  # at its making torch warns of it
    assert mode_sensitive_modules(layer) == []


def test_effects_say_how_much() -> None:
    model = nn.Sequential(nn.Dropout(0.25), nn.BatchNorm1d(2))
    dropout, norm = mode_sensitive_modules(model)
    assert "0.25" in dropout.in_train
    assert "running" in norm.in_eval


def test_training_modes_lists_the_sensitive_ones() -> None:
    assert training_modes(model_with_frozen_norm()) == {"1": False, "2": True}


def test_a_model_left_in_eval_is_named() -> None:
    model = model_with_frozen_norm()
    expected = training_modes(model)
    check_training_modes(model, expected)
    model.eval()
    with pytest.raises(ModelError) as caught:
        check_training_modes(model, expected)
    assert caught.value.where == "2 is in eval mode"


def test_a_frozen_norm_that_woke_up_is_named() -> None:
    model = model_with_frozen_norm()
    expected = training_modes(model)
    model.train()
    with pytest.raises(ModelError) as caught:
        check_training_modes(model, expected)
    assert caught.value.where == "1 is in train mode"


def test_many_modules_are_counted_and_few_named() -> None:
    for count, more in ((5, False), (6, True), (9, True)):
        model = nn.Sequential(*(nn.Dropout(0.5) for _ in range(count)))
        expected = training_modes(model)
        model.eval()
        with pytest.raises(ModelError, match=f"{count} submodules") as caught:
            check_training_modes(model, expected)
        assert caught.value.where.count("in eval mode") == 5
        assert (f"and {count - 5} more" in caught.value.where) == more


def test_a_watch_names_what_changed_and_is_quiet_otherwise() -> None:
    model = model_with_frozen_norm()
    watch = ModeWatch(model)
    watch.check()
    with evaluation_mode(model):
        with pytest.raises(ModelError) as caught:
            watch.check()
        assert caught.value.where == "2 is in eval mode"
    watch.check()
    model[1].train()
    with pytest.raises(ModelError) as caught:
        watch.check()
    assert caught.value.where == "1 is in train mode"
    model[1].eval()
    model[3].eval()
    watch.check()  # a Linear computes the same in both modes


def test_a_model_that_is_itself_sensitive_has_a_name_too() -> None:
    model = ReadsMode()
    watch = ModeWatch(model)
    model.eval()
    with pytest.raises(ModelError, match="1 submodules") as caught:
        watch.check()
    assert caught.value.where == "the model is in eval mode"
