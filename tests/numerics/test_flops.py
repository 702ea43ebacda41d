"""Operations counted on shapes alone: the known formulas, what is refused, and no trace."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surefoot.numerics.flops import UncountableError, count_flops


def of_input(*shape: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(torch.empty(*shape)).sum()


def test_layers_by_their_formulas() -> None:
    # Forward 2 B I O, and again for the weight; the first layer's input needs no gradient.
    layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    assert count_flops(layers, of_input(4, 5)) == 4 * (2 * 2 * 5 * 7 + 3 * 2 * 7 * 3)
    layers[0].requires_grad_(False)
    # Nothing below the second layer needs a gradient any more.
    assert count_flops(layers, of_input(4, 5)) == 4 * (2 * 5 * 7 + 2 * 2 * 7 * 3)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolutions_in_groups(groups: int) -> None:
    outputs = 2 * 8 * 3 * 3
    below, convolution = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3, groups=groups)
    both = count_flops(nn.Sequential(below, convolution), of_input(2, 4, 5, 5))
    products = outputs * (4 // groups) * 3 * 3
    assert both == 2 * (3 * products + 2 * 2 * 4 * 5 * 5 * 4)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(groups: int) -> None:
    convolution = nn.ConvTranspose2d(4, 8, 3, groups=groups)
    products = 2 * 4 * 5 * 5 * (8 // groups) * 3 * 3
    assert count_flops(convolution, of_input(2, 4, 5, 5)) == 2 * 2 * products


def test_recurrent_layers_step_by_step() -> None:
    lstm = nn.LSTM(8, 16, batch_first=True)
    products = 10 * 4 * 16 * (8 + 16)
    # The inputs need no gradient, the first hidden state neither: at most twice the forward.
    found = count_flops(lstm, lambda model: model(torch.empty(2, 5, 8))[0].sum())
    assert 2 * 2 * products <= found <= 3 * 2 * products


def test_attention_counts_scores_and_values() -> None:
    def attention(model: nn.Module) -> Tensor:
        query, key, value = model(torch.empty(2, 6, 8)).chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum()

    projection = 2 * 2 * 2 * 6 * 8 * 24
    assert count_flops(nn.Linear(8, 24), attention) == projection + 3 * 2 * 2 * 2 * 6 * 6 * 8


class Twice(nn.Module):
    """Two layers, of which the second may be computed again in the backward."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.first, self.second, self.again = nn.Linear(4, 4), nn.Linear(4, 4), again

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        if not self.again:
            return self._rest(values)
        out: Tensor = checkpoint(self._rest, values, use_reentrant=self.again == "reentrant")
        return out

    def _rest(self, values: Tensor) -> Tensor:
        return self.second(self.second(values)).relu()


@pytest.mark.parametrize("again", ["reentrant", "not reentrant"])
def test_what_is_computed_again_is_not_the_models_own(again: str) -> None:
    plain = count_flops(Twice(), of_input(3, 4))
    assert plain == 3 * 4 * 4 * 2 * (2 + 3 + 3)
    assert count_flops(Twice(again), of_input(3, 4)) == plain


class Product(nn.Module):
    """One weight, used as a test says."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(6, 6)), function

    def forward(self) -> Tensor:
        return self.function(self.weight).sum()


SMALL: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "mv": (lambda w: w.detach() @ w[0], 2 * 2 * 36),
    "dot": (lambda w: w[1].detach() @ w[0], 2 * 6),
    "addmv": (lambda w: torch.addmv(w[0].detach(), w.detach(), w[1]), 2 * 2 * 36),
    "addr": (lambda w: torch.addr(w.detach(), w[0].detach(), w[1]), 2 * 2 * 36),
    "addbmm": (lambda w: torch.addbmm(w.detach(), w.detach()[None], w[None]), 2 * 2 * 216),
    "vector norm": (lambda w: torch.linalg.vector_norm(w @ w.detach()), 2 * 2 * 216),
}


@pytest.mark.parametrize(("function", "flops"), SMALL.values(), ids=SMALL)
def test_products_that_torch_has_no_formula_for(function: Any, flops: int) -> None:
    assert count_flops(Product(function), lambda model: model()) == flops


@torch.library.custom_op("surefoot_tests::own_kernel", mutates_args=())
def own_kernel(values: Tensor) -> Tensor:
    return values.clone()


own_kernel.register_fake(torch.empty_like)
own_kernel.register_autograd(lambda ctx, gradient: gradient)

UNKNOWN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "own kernel": (lambda w: own_kernel(w), "no formula for surefoot_tests.own_kernel"),
    "distances": (lambda w: torch.cdist(w, w), "no formula for aten._cdist"),
    "Fourier": (lambda w: torch.fft.rfft(w).abs(), "no formula for aten._fft"),
    "solver": (lambda w: torch.linalg.solve(w, w), "no formula for aten._linalg_solve"),
    "a look at a value": (lambda w: w * w.sum().item(), "cannot be called on meta tensors"),
    "shapes by values": (lambda w: w[w > 0], "nonzero"),
    "no gradient": (lambda w: w.detach(), "non-empty"),
}


@pytest.mark.parametrize(("function", "why"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_cannot_be_counted_right_is_refused(function: Any, why: str) -> None:
    with pytest.raises(UncountableError, match=why):
        count_flops(Product(function), lambda model: model())


class Watched(nn.Module):
    """A model with everything that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.calls, self.seen = 0, [0]

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        warnings.warn("a forward was run", stacklevel=1)
        out: Tensor = self.drop(self.norm(self.layer(values)))
        return out


def test_it_leaves_no_trace() -> None:
    model = Watched().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    assert count_flops(model, lambda copied: {"a": of_input(3, 4)(copied)}) == 3 * 2 * 2 * 4 * 4
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == random.getstate()
    assert (model.calls, model.seen, model.training) == (0, [0], False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert torch.empty(1).device.type == "cpu"


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            assert self.head.weight is self.embedding.weight
            out: Tensor = self.head(self.embedding(ids))
            return out

    flops = count_flops(Tied(), lambda model: model(torch.zeros(3, dtype=torch.long)).sum())
    assert flops == 3 * 2 * 3 * 4 * 10
