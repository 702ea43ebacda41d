"""Mixture-of-experts feed-forward layers, with a router that picks a few experts per token.

Tokens are sorted by expert and multiplied in one grouped product. Routing statistics for a loss are
left with the layer while `heard` is active; the layer knows no loss, rank or device, and changes no
statistic in the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.core.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Experts of a feed-forward layer, and how tokens are routed to them.

    Args:
        num_experts: E, from which the router picks.
        experts_per_token: k, the number of experts that process each token.
        shared_experts: further experts that process every token (DeepSeekMoE, Dai et al. 2024): one
            feed-forward layer of that multiple of the width.
        every: every n-th layer is routed, starting with the n-th; the others are dense.
        expert_dim: width of one expert; `as-dense` for that of the dense layers.
        capacity_factor: of the T tokens of a micro-batch on one rank, an expert takes at most
            `ceil(capacity_factor * T * k / E)`; later ones are dropped and bypass the layer
            (Switch, Fedus et al. 2022). `dropless` drops none (MegaBlocks, Gale et al. 2023).
        scores: `softmax` over all experts, or `sigmoid` of each (DeepSeek-V3, 2024).
        gates: weights of the k experts: scores divided by their sum (`normalized`) or `as-scored`.
        balance: what balances the load: a `loss` (Switch), a `bias` added to the scores for the
            choice of experts, which moves after each update (Wang et al. 2024; DeepSeek-V3), or
            `none`.
        balance_weight: factor of the balance loss (Switch: 0.01).
        bias_rate: step of a bias per update (DeepSeek-V3: 0.001).
        z_weight: factor of the router's z loss (ST-MoE, Zoph et al. 2022: 0.001); 0 for none.
    """

    num_experts: int
    experts_per_token: int = 2
    shared_experts: int = 0
    every: int = 1
    expert_dim: int | Literal["as-dense"] = "as-dense"
    capacity_factor: float | Literal["dropless"] = "dropless"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    gates: Literal["normalized", "as-scored"] = "normalized"
    balance: Literal["loss", "bias", "none"] = "loss"
    balance_weight: float = 0.01
    bias_rate: float = 0.001
    z_weight: float = 0.001

    def __post_init__(self) -> None:
        broken = [
            f"{name} = {value} is below {least}"
            for name, value, least in (
                ("num_experts", self.num_experts, 2),
                ("experts_per_token", self.experts_per_token, 1),
                ("shared_experts", self.shared_experts, 0),
                ("every", self.every, 1),
                ("expert_dim", 1 if self.expert_dim == "as-dense" else self.expert_dim, 1),
                ("balance_weight", self.balance_weight, 0),
                ("bias_rate", self.bias_rate, 0),
                ("z_weight", self.z_weight, 0),
            )
            if value < least
        ]
        if self.experts_per_token > self.num_experts:
            broken.append(
                f"experts_per_token = {self.experts_per_token} of num_experts = {self.num_experts}"
            )
        if self.experts_per_token == 1 and self.gates == "normalized":
            broken.append(
                "the normalized gate of a single expert is always 1, so the router would get no "
                "gradient from the loss: use gates = as-scored"
            )
        if self.capacity_factor != "dropless" and not 0 < self.capacity_factor < math.inf:
            broken.append(f"capacity_factor = {self.capacity_factor} is not above 0")
        if broken:
            raise ModelError(
                "these experts cannot be built: " + "; ".join(broken),
                where="MoEConfig",
                rule="at least 2 experts, of which 1 to all process a token; no negative factor",
                remedy="change the named sizes",
            )

    def is_routed(self, layer: int) -> bool:
        """Whether the layer of this index (from 0) has experts."""
        return (layer + 1) % self.every == 0

    @property
    def has_balance_loss(self) -> bool:
        return self.balance == "loss" and self.balance_weight > 0


class Routing(NamedTuple):
    """Routing statistics of one forward of a layer: sums over its T tokens."""

    counts: Tensor
    """Integer [E]: how often each expert was chosen, before dropping; sums to T * k."""
    probability_sums: Tensor
    """[E], with gradients: each expert's share of the scores, summed over tokens."""
    z_sum: Tensor
    """0-dim, with gradients; see `router_z_sum`."""
    num_dropped: Tensor
    """0-dim integer: number of choices beyond the capacity."""


def balance_sum(probability_sums: Tensor, fractions: Tensor) -> Tensor:
    """The balance loss (Fedus et al. 2022, eq. 4), summed over tokens instead of averaged.

    `E * sum over i of f_i * P_i`: f_i is the fraction of choices of expert i, P_i the mean of its
    probability. Divided by the number of tokens, an even load gives 1. Gradients flow through P
    only.

    Args:
        probability_sums: [E] or [layers, E], of some tokens.
        fractions: same shape, of the same tokens or of all that they are balanced with.
    """
    return probability_sums.shape[-1] * (fractions.detach() * probability_sums).sum()


def load_fractions(counts: Tensor) -> Tensor:
    """f_i from counts [..., E]; 0 where nothing was counted."""
    total = counts.sum(dim=-1, keepdim=True).clamp(min=1)
    return counts / total


def router_z_sum(logits: Tensor) -> Tensor:
    """The z loss (Zoph et al. 2022, eq. 5), summed over tokens: `log(sum over i of exp(x_i))^2`.

    Args:
        logits: [T, E].
    """
    return logits.logsumexp(dim=-1).square().sum()


def bias_change(counts: Tensor, rate: float) -> Tensor:
    """Step of the expert biases (Wang et al. 2024): `rate * sign(mean load - load)`.

    Args:
        counts: [..., E] of an update.
    """
    load = counts.double()
    return rate * torch.sign(load.mean(dim=-1, keepdim=True) - load)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiplies each row by the matrix of its expert.

    In bf16 on a GPU with torch's grouped kernel, without a device sync; otherwise one product per
    expert, for which the counts are copied to the host.

    Args:
        rows: [N, D], sorted by expert.
        weights: [E, D, H].
        counts: integer [E], number of rows of each expert.

    Returns:
        [N, H].
    """
    dtype = _product_dtype(rows)
    if rows.is_cuda and dtype == torch.bfloat16 and _fits_kernel(weights):
        return grouped_kernel(rows.to(dtype), weights.to(dtype), counts)
    return looped_product(rows, weights, counts)


# Sizes that the host must know change each time: a compiler would recompile each time.
@torch._disable_dynamo  # Like torch.compiler.disable, which imports the compiler.
def looped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`grouped_product` as one product per expert."""
    parts = zip(rows.split(counts.tolist()), weights.unbind(), strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def grouped_kernel(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`grouped_product` with torch's kernel."""
    product: Any = F.grouped_mm
    ends: Tensor = counts.cumsum(0).to(torch.int32)
    result: Tensor = product(rows, weights, offs=ends)
    return result


def _product_dtype(rows: Tensor) -> torch.dtype:
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype


def _fits_kernel(weights: Tensor) -> bool:
    # Rows must be aligned to 16 bytes.
    return hasattr(F, "grouped_mm") and all(size % 8 == 0 for size in weights.shape[1:])


class Experts(nn.Module):
    """E feed-forward layers as one: `W2 gelu(W1 x)`, or gated `W2 (silu(W1 x) * W3 x)`. No biases.

    Weights are [E, in, out]. With expert parallelism a rank holds those of some experts.
    """

    def __init__(self, num_experts: int, dim: int, expert_dim: int, *, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.input = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        if gated:
            self.gate = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        self.output = nn.Parameter(torch.empty(num_experts, expert_dim, dim))

    @torch.no_grad()
    def reset_parameters(self, std: float, output_std: float) -> None:
        """Draws all weights from torch's global random stream."""
        nn.init.normal_(self.input, std=std)
        if self.gated:
            nn.init.normal_(self.gate, std=std)
        nn.init.normal_(self.output, std=output_std)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[N, D] to [N, D]; rows are sorted by expert, `counts` [E] of the experts held here."""
        hidden = grouped_product(rows, _held(self.input), counts)
        if self.gated:
            hidden = F.silu(grouped_product(rows, _held(self.gate), counts)) * hidden
        else:
            hidden = F.gelu(hidden)
        return grouped_product(hidden, _held(self.output), counts)


def _held(weight: Tensor) -> Tensor:
    """The local shard of a weight, differentiable."""
    local: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return local


Exchange = Callable[[Tensor, Tensor, Experts], Tensor]
"""(rows [N, D] sorted by expert, counts [E], experts) -> [N, D], wherever the experts are."""


def stay(rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
    """The exchange if all experts are local."""
    result: Tensor = experts(rows, counts)
    return result


class RoutedFeedForward(nn.Module):
    """Feed-forward layer of the experts chosen by a router, plus shared ones.

    `y = shared(x) + sum over the chosen experts i of gate_i(x) * expert_i(x)`. The router computes
    in at least float32, also under autocast (Fedus et al. 2022, selective precision).

    Args:
        config: of the experts.
        dim: D, width of a token.
        expert_dim: width of one expert.
        gated: SwiGLU instead of GELU.
        shared: a feed-forward layer for all tokens; None for none.
    """

    expert_bias: Tensor

    def __init__(
        self, config: MoEConfig, dim: int, expert_dim: int, *, gated: bool, shared: nn.Module | None
    ) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(dim, config.num_experts, bias=False)
        self.experts = Experts(config.num_experts, dim, expert_dim, gated=gated)
        if shared is not None:
            self.shared = shared
        if config.balance == "bias":
            self.register_buffer("expert_bias", torch.zeros(config.num_experts))
        self.exchange: Exchange = stay
        self.takes_statistics = True
        """False while routing is not to be counted."""
        self.is_heard = False
        self.routing: Routing | None = None
        """Statistics of the latest forward, while `heard` is active."""

    @property
    def depends_on_split(self) -> str:
        """In what way its output depends on how a batch is split; empty if not at all."""
        factor = self.config.capacity_factor
        if factor == "dropless":
            return ""
        return f"each micro-batch drops tokens beyond a capacity of {factor:g} times the even load"

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        num_chosen = self.config.experts_per_token
        gates, chosen, shares, logits = self._choose(tokens)
        # One row per choice, in token order; sorted, they are in expert order.
        by_place = chosen.reshape(-1)
        experts, places = by_place.sort(stable=True)
        bounds = torch.arange(self.config.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, bounds, right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        sent, kept = counts, places
        if self.config.capacity_factor != "dropless":
            capacity = self._capacity(len(places), self.config.capacity_factor)
            rank_in_expert = torch.arange(len(places), device=places.device)
            rank_in_expert = rank_in_expert - (ends - counts)[experts]
            kept = places[rank_in_expert < capacity]
            sent = counts.clamp(max=capacity)
        # In the dtype of the products, in which they may be sent.
        rows = tokens.to(_product_dtype(tokens)).index_select(0, kept // num_chosen)
        returned = self.exchange(rows, sent, self.experts)
        wide = returned.to(gates.dtype)
        spread = wide.new_zeros(len(places), wide.shape[-1]).index_copy(0, kept, wide)
        mixed = (spread.view(len(tokens), num_chosen, -1) * gates.unsqueeze(-1)).sum(dim=1)
        # Computed whether or not it is used: a recomputed forward must not differ.
        routing = Routing(
            counts, shares.sum(dim=0), router_z_sum(logits), counts.sum() - sent.sum()
        )
        if self.is_heard:
            self.routing = routing
        output = mixed.to(hidden.dtype).view_as(hidden)
        return output + self.shared(hidden) if hasattr(self, "shared") else output

    def _choose(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gates [T, k], experts [T, k], shares [T, E] that add up to 1, logits [T, E]."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.to(wide), self.router.weight.to(wide))
            if self.config.scores == "softmax":
                scores = shares = logits.softmax(dim=-1)
            else:
                scores = logits.sigmoid()
                shares = scores / scores.sum(dim=-1, keepdim=True)
            ranked = scores.detach()
            if self.config.balance == "bias":
                ranked = ranked + self.expert_bias
            chosen = ranked.topk(self.config.experts_per_token, dim=-1).indices
            gates = scores.gather(-1, chosen)
            if self.config.gates == "normalized":
                gates = gates / gates.sum(dim=-1, keepdim=True)
        return gates, chosen, shares, logits

    def _capacity(self, num_choices: int, factor: float) -> int:
        return math.ceil(factor * num_choices / self.config.num_experts)


def routed_layers(model: nn.Module) -> dict[str, RoutedFeedForward]:
    """The routed layers of a model by name, in model order."""
    return {n: m for n, m in model.named_modules() if isinstance(m, RoutedFeedForward)}


@contextmanager
def heard(layers: Sequence[RoutedFeedForward]) -> Iterator[list[Routing]]:
    """Context manager that collects the routing of each layer; the list is filled on exit.

    Raises:
        ModelError: a layer was not used.
    """
    routings: list[Routing] = []
    for layer in layers:
        layer.is_heard = True
    try:
        yield routings
        found = [layer.routing for layer in layers]
        routings += [routing for routing in found if routing is not None]
    finally:
        for layer in layers:
            layer.is_heard, layer.routing = False, None
    if len(routings) != len(layers):
        raise ModelError(
            f"{len(layers) - len(routings)} routed layers were not used in the forward",
            rule="the loss balances every routed layer of the model",
            remedy="use all layers, or remove the unused ones from the model",
        )


def idle_elements(model: nn.Module) -> int:
    """Number of expert weights that a token does not use: (1 - k / E) of them."""
    idle = 0
    for layer in routed_layers(model).values():
        elements = sum(weight.numel() for weight in layer.experts.parameters())
        per_expert = elements // layer.config.num_experts
        idle += per_expert * (layer.config.num_experts - layer.config.experts_per_token)
    return idle
