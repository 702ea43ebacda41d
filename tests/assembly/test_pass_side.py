"""The pass side of one rank: nothing is summed, gradients are those of the window."""

from __future__ import annotations

import torch

from assembly.parts import assembled
from surefoot.core.identity import identity
from surefoot.numerics.loss_scaling import NoLossScale


def test_one_rank_asks_nobody_and_has_all_there_is() -> None:
    passing = assembled().trainable.passing
    assert passing.ranks.sum_over_ranks is identity and passing.ranks.host_sums is None
    assert passing.has_whole_weights and passing.has_all_layers
    assert passing.loads is None and passing.device_milliseconds() is None


def test_the_pass_leaves_the_gradient_of_the_mean_and_the_norm_is_that_of_the_weights() -> None:
    assembly = assembled(train={"accumulation": 2})
    model, passing = assembly.material.model, assembly.trainable.passing
    windows = assembly.open_windows(assembly.trainable.state.progress.cursor)
    window = next(windows)
    windows.close()
    losses = passing.run_pass(window.micro_batches, window.weights, NoLossScale())
    inputs, targets = (torch.cat([m.data[i] for m in window.micro_batches]) for i in range(2))
    expected = (model(inputs) - targets).pow(2).mean()
    assert torch.allclose(losses["loss"], expected)
    (gradient,) = torch.autograd.grad(expected, [model.weight])
    assert torch.allclose(model.weight.grad, gradient)  # type: ignore[arg-type]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.allclose(passing.ranks.weight_norm(), weights.norm())
