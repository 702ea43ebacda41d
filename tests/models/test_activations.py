"""Activations: the values that their papers state."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from surefoot.models.activations import activation
from surefoot.models.gpt import FeedForward, GPTConfig

GRID = torch.linspace(-6, 6, 1_200_001, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "least"),
    [("relu", 0.0), ("gelu", -0.169971), ("silu", -0.278465), ("tanh", -0.999988)],
)
def test_least_value(name, least):
    assert activation(name)(GRID).min().item() == pytest.approx(least, abs=1e-6)


def test_steepest_sigmoid_is_a_quarter():
    grid = GRID.clone().requires_grad_()
    activation("sigmoid")(grid).sum().backward()
    assert grid.grad.max().item() == pytest.approx(0.25, abs=1e-12)


def test_swiglu_is_a_gated_silu():
    config = GPTConfig.llama(
        vocabulary_size=5,
        sequence_length=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        embedding_dim=8,
    )
    layer = FeedForward(config)
    hidden = torch.randn(1, 3, 8)
    gated = F.silu(hidden @ layer.gate.weight.T) * (hidden @ layer.input.weight.T)
    torch.testing.assert_close(layer(hidden), gated @ layer.output.weight.T)
