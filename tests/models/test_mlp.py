"""The perceptron."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from surefoot.core.errors import ModelError
from surefoot.models.mlp import MLP, MLPConfig


def build(**changes) -> MLP:
    torch.manual_seed(0)
    return MLP(MLPConfig(**({"in_features": 6, "hidden": (8, 8), "out_features": 3} | changes)))


def test_equals_its_layers():
    model = build()
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    inputs = torch.randn(5, 6)
    assert torch.equal(model(inputs), plain(inputs))
    assert torch.equal(model(inputs.view(5, 2, 3)), plain(inputs))


def test_residual_layers_add_their_input():
    model = build(residual=True)
    inputs = torch.randn(5, 6)
    first = torch.relu(model.blocks[0].linear(inputs))
    second = first + torch.relu(model.blocks[1].linear(first))
    assert torch.equal(model(inputs), model.head(second))


def test_no_hidden_layer_is_a_linear_model():
    model = build(hidden=())
    inputs = torch.randn(5, 6)
    assert torch.equal(model(inputs), model.head(inputs))


@pytest.mark.parametrize("norm", ["none", "layernorm", "batchnorm"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh", "sigmoid"])
def test_gradients_are_those_of_the_function(norm, activation):
    model = build(norm=norm, activation=activation, residual=True).double()
    inputs = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    names, values = zip(*model.named_parameters(), strict=True)
    values = tuple(value.detach().clone().requires_grad_() for value in values)

    def scores(given, *weights):
        return functional_call(model, dict(zip(names, weights, strict=True)), (given,))

    assert torch.autograd.gradcheck(scores, (inputs, *values))


@pytest.mark.parametrize(
    ("activation", "rule", "low", "high"),
    [
        ("relu", "he", 0.5, 2.0),
        ("tanh", "xavier", 0.03, 1.0),
        ("tanh", "he", 0.15, 1.0),
        ("relu", "xavier", 0.0, 0.01),
    ],
)
def test_initial_rule_keeps_the_signal(activation, rule, low, high):
    """Mean square after ten layers; Xavier's rule with ReLU halves it in each."""
    torch.manual_seed(1)
    config = MLPConfig(
        in_features=256,
        hidden=(256,) * 10,
        out_features=1,
        activation=activation,
        initialization=rule,
    )
    model = MLP(config)
    hidden = torch.randn(512, 256)
    for block in model.blocks:
        hidden = block(hidden)
    assert low <= hidden.square().mean().item() <= high
    assert all((block.linear.bias == 0).all() for block in model.blocks)


def test_initial_variances():
    torch.manual_seed(1)
    fields = {"in_features": 300, "hidden": (500,), "out_features": 200}
    he = MLP(MLPConfig(**fields, initialization="he"))
    xavier = MLP(MLPConfig(**fields, initialization="xavier"))
    assert he.blocks[0].linear.weight.var().item() == pytest.approx(2 / 300, rel=0.02)
    assert xavier.blocks[0].linear.weight.var().item() == pytest.approx(2 / 800, rel=0.02)
    assert he.head.weight.var().item() == pytest.approx(2 / 700, rel=0.02)


@pytest.mark.parametrize("norm", ["none", "layernorm", "batchnorm"])
def test_reset_draws_everything_anew(norm):
    model = build(norm=norm)
    for value in model.state_dict().values():
        value.fill_(7)
    torch.manual_seed(0)
    model.reset_parameters()
    expected = MLP(model.config)
    torch.manual_seed(0)
    expected.reset_parameters()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_sigmoid_layers_starve_the_first_one():
    model = build(in_features=6, hidden=(6,) * 10, activation="sigmoid").double()
    with torch.no_grad():
        for block in model.blocks:
            block.linear.weight.copy_(torch.eye(6))
    inputs = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    hidden = inputs
    for block in model.blocks:
        hidden = block(hidden)
    hidden[0, 0].backward()
    assert 0 < inputs.grad.abs().max().item() <= 0.25**10


def test_dropout_acts_in_training_only():
    model = build(dropout=0.5)
    inputs = torch.randn(5, 6)
    assert not torch.equal(model(inputs), model(inputs))
    assert torch.equal(model.eval()(inputs), build().eval()(inputs))


def test_wrong_shapes_are_refused():
    with pytest.raises(ModelError, match=r"inputs have shape \[5, 7\]") as caught:
        build()(torch.randn(5, 7))
    assert "6 features" in caught.value.rule
    with pytest.raises(ModelError, match=r"shape \[6\]"):
        build()(torch.randn(6))
    with pytest.raises(ModelError, match="widths"):
        MLPConfig(in_features=0, hidden=(), out_features=1)
    with pytest.raises(ModelError, match="dropout"):
        MLPConfig(in_features=1, hidden=(), out_features=1, dropout=1.0)
