"""Routed feed-forwards: against a dense loop over all experts, and the published formulas."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from host_sync import no_host_sync
from surefoot.core.errors import ModelError
from surefoot.models import moe
from surefoot.models.gpt import GPT, FeedForward, GPTConfig
from surefoot.models.moe import (
    MoEConfig,
    RoutedFeedForward,
    Routing,
    balance_sum,
    bias_change,
    grouped_kernel,
    grouped_product,
    heard,
    idle_elements,
    load_fractions,
    routed_layers,
    router_z_sum,
)

DIM, WIDTH = 8, 16


def layer_of(gated: bool = True, shared: bool = False, **fields: Any) -> RoutedFeedForward:
    torch.manual_seed(3)
    config = MoEConfig(**({"num_experts": 5} | fields))
    dense = FeedForward(
        GPTConfig(
            vocabulary_size=2,
            sequence_length=2,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            embedding_dim=DIM,
            feedforward_dim=WIDTH,
        )
    )
    layer = RoutedFeedForward(config, DIM, WIDTH, gated=gated, shared=dense if shared else None)
    layer.experts.reset_parameters(0.4, 0.4)
    return layer.double()


def tokens(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 7, DIM, generator=generator, dtype=torch.float64, requires_grad=True)


def routing_of(layer: RoutedFeedForward, hidden: Tensor) -> tuple[Tensor, Routing]:
    with heard([layer]) as routings:
        output = layer(hidden)
    return output, routings[0]


def expert(layer: RoutedFeedForward, index: int, token: Tensor) -> Tensor:
    experts = layer.experts
    inner = token @ experts.input[index]
    inner = F.silu(token @ experts.gate[index]) * inner if experts.gated else F.gelu(inner)
    return inner @ experts.output[index]


def dense_loop(layer: RoutedFeedForward, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
    """Every expert computes every token; the gates of those that are not chosen are 0."""
    config = layer.config
    logits = hidden @ layer.router.weight.T
    scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    order = ranked.argsort(dim=-1, descending=True)
    chosen = torch.zeros_like(scores).scatter(-1, order[..., : config.experts_per_token], 1.0)
    gates = scores * chosen
    if config.gates == "normalized":
        gates = gates / gates.sum(-1, keepdim=True)
    outputs = [gates[..., i : i + 1] * expert(layer, i, hidden) for i in range(config.num_experts)]
    total = torch.stack(outputs).sum(0)
    return total + layer.shared(hidden) if hasattr(layer, "shared") else total


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"experts_per_token": 1, "gates": "as-scored"},
        {"experts_per_token": 3, "scores": "sigmoid"},
        {"experts_per_token": 5, "gates": "as-scored"},
        {"balance": "bias", "scores": "sigmoid"},
    ],
)
def test_a_dropless_layer_is_a_dense_loop_over_its_experts(
    fields: dict[str, Any], gated: bool
) -> None:
    layer = layer_of(gated, shared=True, **fields)
    bias = None
    if layer.config.balance == "bias":
        bias = torch.tensor([0.3, -0.3, 0.0, 0.2, -0.1], dtype=torch.float64)
        layer.expert_bias.copy_(bias)
    mask = torch.randn(3, 7, DIM, dtype=torch.float64)
    results = []
    for compute in (layer, lambda hidden: dense_loop(layer, hidden, bias)):
        hidden = tokens()
        output = compute(hidden)
        gradients = torch.autograd.grad((output * mask).sum(), [hidden, *layer.parameters()])
        results.append([output, *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_bias_chooses_but_does_not_weigh() -> None:
    layer = layer_of(balance="bias", experts_per_token=2)
    layer.expert_bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0]))
    output, routing = routing_of(layer, tokens())
    assert routing.counts.tolist() == [21, 21, 0, 0, 0]
    scores = (tokens() @ layer.router.weight.T).softmax(-1)[..., :2]
    gates = scores / scores.sum(-1, keepdim=True)
    expected = sum(gates[..., i : i + 1] * expert(layer, i, tokens()) for i in (0, 1))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_routing_and_losses_are_those_of_the_papers() -> None:
    layer = layer_of(experts_per_token=2)
    _, routing = routing_of(layer, tokens())
    logits = (tokens() @ layer.router.weight.T).reshape(21, 5)
    counts, probabilities, z = [0] * 5, [0.0] * 5, 0.0
    for row in logits.tolist():
        exponentials = [math.exp(x) for x in row]
        for i in range(5):
            probabilities[i] += exponentials[i] / sum(exponentials)
        for i in sorted(range(5), key=lambda i: -row[i])[:2]:
            counts[i] += 1
        z += math.log(sum(exponentials)) ** 2
    assert routing.counts.tolist() == counts
    assert routing.probability_sums.tolist() == pytest.approx(probabilities, rel=1e-12)
    assert routing.z_sum.item() == router_z_sum(logits).item() == pytest.approx(z, rel=1e-12)
    fractions = load_fractions(routing.counts)
    assert fractions.tolist() == pytest.approx([c / 42 for c in counts], rel=1e-6)
    # Fedus et al. 2022, eq. 4: N * sum of f_i * P_i, here times the 21 tokens.
    expected = 5 * sum(c / 42 * p for c, p in zip(counts, probabilities, strict=True))
    found = balance_sum(routing.probability_sums, routing.counts.double() / 42)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_an_even_load_has_balance_1_and_a_collapsed_one_the_number_of_experts() -> None:
    even, collapsed = torch.full((4,), 0.25).double(), torch.tensor([1.0, 0, 0, 0]).double()
    assert balance_sum(even * 6, even).item() / 6 == 1.0
    assert balance_sum(collapsed * 6, collapsed).item() / 6 == 4.0


def test_the_balance_loss_pulls_probability_from_loaded_experts() -> None:
    sums = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    fractions = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64, requires_grad=True)
    balance_sum(sums, fractions).backward()
    assert sums.grad is not None and sums.grad.tolist() == pytest.approx([1.5, 0.9, 0.6])
    assert fractions.grad is None


def test_biases_move_by_the_sign_of_the_load_error() -> None:
    counts = torch.tensor([[4, 2, 0, 2], [5, 5, 5, 5]])
    assert bias_change(counts, 0.001).tolist() == [[-0.001, 0.0, 0.001, 0.0], [0.0] * 4]


def test_a_capacity_drops_the_last_tokens_of_a_full_expert() -> None:
    free = layer_of(experts_per_token=2)
    tight = layer_of(experts_per_token=2, capacity_factor=0.7)
    whole, _ = routing_of(free, tokens())
    output, routing = routing_of(tight, tokens())
    capacity = math.ceil(0.7 * 42 / 5)
    counts = routing.counts.tolist()
    assert max(counts) > capacity and sum(counts) == 42
    assert routing.num_dropped.item() == sum(max(0, count - capacity) for count in counts)
    # Drop by hand, in the order of the tokens.
    flat = tokens().reshape(21, DIM)
    logits = flat @ tight.router.weight.T
    filled = [0] * 5
    for index in range(21):
        scores = logits[index].softmax(-1)
        best = scores.topk(2)
        row = torch.zeros(DIM, dtype=torch.float64)
        for gate, chosen in zip(
            best.values / best.values.sum(), best.indices.tolist(), strict=True
        ):
            filled[chosen] += 1
            if filled[chosen] <= capacity:
                row = row + gate * expert(tight, chosen, flat[index])
        torch.testing.assert_close(output.reshape(21, DIM)[index], row, rtol=1e-12, atol=1e-12)
    assert not torch.equal(whole, output)
    assert "0.7" in tight.depends_on_split and free.depends_on_split == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_s_grouped_kernel_gives_the_numbers_of_the_loop(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(20, 16, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(4, 16, 24, generator=generator).to(dtype).requires_grad_()
    mask = torch.randn(20, 24, generator=generator).to(dtype)
    counts = torch.tensor([5, 0, 7, 8])
    found = []
    for product in (grouped_product, grouped_kernel):
        output = product(rows, weights, counts)
        found.append([output, *torch.autograd.grad((output * mask).sum(), [rows, weights])])
    for loop, kernel in zip(*found, strict=True):
        torch.testing.assert_close(loop, kernel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_layer_in_bf16_has_the_numbers_of_the_loop_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = layer_of().float().cuda()
    hidden = tokens().detach().float().cuda().requires_grad_()
    mask = torch.randn(3, 7, DIM, device="cuda")
    found = []
    for allowed in (True, False):
        monkeypatch.setattr(moe, "_fits_kernel", lambda weights, allowed=allowed: allowed)
        with no_host_sync() if allowed else nullcontext():
            with torch.autocast("cuda", torch.bfloat16):
                output = layer(hidden)
            found.append(
                [output, *torch.autograd.grad((output * mask).sum(), [hidden, *layer.parameters()])]
            )
    for kernel, loop in zip(*found, strict=True):
        torch.testing.assert_close(kernel, loop, rtol=2e-2, atol=2e-2)


def test_under_autocast_experts_compute_in_bf16_and_the_router_does_not() -> None:
    layer = layer_of().float()
    hidden = tokens().detach().float()
    _, exact = routing_of(layer, hidden)
    with torch.autocast("cpu", torch.bfloat16):
        output, routing = routing_of(layer, hidden)
        product = layer.experts(hidden[0], torch.tensor([7, 0, 0, 0, 0]))
    assert (output.dtype, product.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(routing.probability_sums, exact.probability_sums)
    assert routing.z_sum.item() == exact.z_sum.item()


def small_gpt(num_layers: int = 4, **experts: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig.llama(
            vocabulary_size=31,
            sequence_length=12,
            num_layers=num_layers,
            num_heads=2,
            num_kv_heads=2,
            embedding_dim=16,
            feedforward_dim=24,
            experts=experts,
        )
    )


def test_each_nth_layer_of_a_decoder_is_routed() -> None:
    model = small_gpt(num_experts=4, every=2, expert_dim=32, shared_experts=2)
    layers = routed_layers(model)
    assert list(layers) == ["blocks.1.feedforward", "blocks.3.feedforward"]
    first = layers["blocks.1.feedforward"]
    assert first.experts.input.shape == (4, 16, 32) and first.experts.output.shape == (4, 32, 16)
    assert first.shared.input.weight.shape == (64, 16)
    assert isinstance(model.config.experts, MoEConfig)
    assert idle_elements(model) == 2 * (4 - 2) * 3 * 16 * 32


def test_experts_start_as_the_dense_layers_do() -> None:
    model = small_gpt(num_experts=64, shared_experts=1)
    layer = model.blocks[0].feedforward
    residual = 0.02 / math.sqrt(8)
    for weight, std in (
        (layer.experts.input, 0.02),
        (layer.experts.gate, 0.02),
        (layer.experts.output, residual),
        (layer.shared.output.weight, residual),
        (layer.router.weight, 0.02),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.15)


def test_routed_layers_see_no_future() -> None:
    model = small_gpt(num_experts=4).double().eval()
    ids = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[:, 5:] = (ids[:, 5:] + 1) % 31
    torch.testing.assert_close(model(ids)[:, :5], model(changed)[:, :5], rtol=1e-12, atol=1e-12)


def test_nothing_is_left_with_a_layer_that_nobody_hears() -> None:
    layer = layer_of()
    layer(tokens())
    assert layer.routing is None
    routing_of(layer, tokens())
    assert layer.routing is None and not layer.is_heard


def test_a_layer_that_takes_no_part_is_refused() -> None:
    layer, idle = layer_of(), layer_of()
    with pytest.raises(ModelError, match="1 routed layers were not used"), heard([layer, idle]):
        layer(tokens())
    assert layer.routing is None and not idle.is_heard


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_experts": 1}, "num_experts = 1 is below 2"),
        ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token = 5 of num_experts = 4"),
        ({"num_experts": 4, "experts_per_token": 1}, "use gates = as-scored"),
        ({"num_experts": 4, "capacity_factor": 0.0}, "capacity_factor = 0.0 is not above 0"),
        ({"num_experts": 4, "z_weight": -1.0}, "z_weight = -1.0 is below 0"),
    ],
)
def test_what_cannot_be_built_is_said(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError) as refused:
        MoEConfig(**fields)
    assert told in str(refused.value)
