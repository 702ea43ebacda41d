"""Routers of a model in training: the terms of their losses, expert loads, biases.

The terms are sums over tokens, like those of a task. Knows nothing of other losses, or of how
experts are distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from surefoot.models.moe import (
    RoutedFeedForward,
    Routing,
    balance_sum,
    bias_change,
    heard,
    load_fractions,
    routed_layers,
)

BALANCE = "balance"
"""Term of the loss: the balance losses of all routed layers, times their weight."""
ROUTER_Z = "router_z"
"""Term of the loss: the z losses of all routed layers, times their weight."""
DROPPED = "dropped_tokens"
OF_TOGETHER = (
    "the load is that of the tokens which all data-parallel ranks see in one micro-batch each, "
    "whatever their number; another number of them together is another loss"
)
"""What a balance loss depends on."""

SumOverRanks = Callable[[Tensor], Tensor]


class ModelRouterLoads:
    """How often each expert was chosen in a window, and the bias updates from it.

    Args:
        layers: of the model, in its order.
        sum_over_ranks: sums a tensor over the data-parallel ranks, in place.
    """

    def __init__(self, layers: Sequence[RoutedFeedForward], sum_over_ranks: SumOverRanks) -> None:
        self._layers = layers
        self._sum_over_ranks = sum_over_ranks
        self._sizes = [layer.config.num_experts for layer in layers]
        self._moves = any(layer.config.balance == "bias" for layer in layers)
        self._is_open = False
        self._own: Tensor | None = None
        self._of_all: Tensor | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context manager that counts routing for the window; earlier counts are dropped."""
        self._own = self._of_all = None
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def add(self, counts: Tensor, num_dropped: Tensor) -> None:
        """Counts one micro-batch of this rank, inside `counting`.

        Args:
            counts: integer, those of all layers one after the other.
            num_dropped: 0-dim.
        """
        if self._is_open:
            seen = torch.cat([counts, num_dropped.reshape(1)])
            self._own = seen if self._own is None else self._own + seen
            self._of_all = None

    @torch.no_grad()
    def update(self, finite: Callable[[], Tensor]) -> None:
        """Moves the biases of layers with `balance: bias`, if `finite()` is true."""
        if not self._moves or self._own is None:
            return
        applied = finite()
        for layer, counts in zip(self._layers, self._window().split(self._sizes), strict=True):
            if layer.config.balance == "bias":
                change = bias_change(counts, layer.config.bias_rate) * applied
                layer.expert_bias += change.to(layer.expert_bias.dtype)

    def measures(self) -> dict[str, Tensor]:
        """Of the window: the most and the least loaded expert of any layer, over the mean of its
        layer, and the share of choices that were dropped. Every rank asks for it alike."""
        if self._own is None:
            return {}
        counts = self._window()
        loads = [c / c.double().mean().clamp(min=1e-9) for c in counts.split(self._sizes)]
        assert self._of_all is not None
        return {
            "expert_load_max": torch.stack([load.max() for load in loads]).max(),
            "expert_load_min": torch.stack([load.min() for load in loads]).min(),
            DROPPED: self._of_all[-1] / counts.sum().double().clamp(min=1),
        }

    def _window(self) -> Tensor:
        """Counts of all layers over all ranks; summed once per window."""
        if self._of_all is None:
            assert self._own is not None
            self._of_all = self._sum_over_ranks(self._own.clone())
        return self._of_all[:-1]


class ModelRouters:
    """All routers of a model.

    Args:
        layers: of the model, in its order; at least one.
        sum_over_ranks: sums a tensor over the data-parallel ranks, in place.
    """

    def __init__(self, layers: Sequence[RoutedFeedForward], sum_over_ranks: SumOverRanks) -> None:
        self._layers = layers
        self._sum_over_ranks = sum_over_ranks
        self.loads = ModelRouterLoads(layers, sum_over_ranks)
        balances = any(layer.config.has_balance_loss for layer in layers)
        self._drops = any(layer.depends_on_split for layer in layers)
        has_z = any(layer.config.z_weight > 0 for layer in layers)
        self.terms = (BALANCE,) * balances + (ROUTER_Z,) * has_z
        """Names of what `loss_sums` gives."""
        self.depends_on_split: Mapping[str, str] = {BALANCE: OF_TOGETHER} if balances else {}
        """Terms that depend on the split, and why."""

    def listening(self) -> AbstractContextManager[list[Routing]]:
        """Context manager that collects the routing of one forward; the list is filled on exit."""
        return heard(self._layers)

    def loss_sums(self, routings: Sequence[Routing]) -> dict[str, Tensor]:
        """Sums over the tokens of one forward, which counts for the loads."""
        counts = torch.cat([routing.counts for routing in routings])
        dropped = torch.stack([routing.num_dropped for routing in routings]).sum()
        if not self._layers[0].takes_statistics:
            # The filler of a rank without data: it takes part in the exchange and is not counted.
            counts, dropped = torch.zeros_like(counts), torch.zeros_like(dropped)
        self.loads.add(counts, dropped)
        pairs = list(zip(self._layers, routings, strict=True))
        sums: dict[str, Tensor] = {}
        if BALANCE in self.terms:
            of_all = self._sum_over_ranks(counts).split([len(r.counts) for r in routings])
            sums[BALANCE] = _added(
                layer.config.balance_weight * balance_sum(r.probability_sums, _like(r, c))
                for (layer, r), c in zip(pairs, of_all, strict=True)
                if layer.config.has_balance_loss
            )
        if ROUTER_Z in self.terms:
            sums[ROUTER_Z] = _added(layer.config.z_weight * r.z_sum for layer, r in pairs)
        return sums

    def metric_sums(self, routings: Sequence[Routing]) -> dict[str, tuple[Tensor, Tensor]]:
        """With a capacity, the share of dropped choices; else nothing."""
        if not self._drops:
            return {}
        dropped = torch.stack([routing.num_dropped for routing in routings]).sum()
        chosen = torch.stack([routing.counts.sum() for routing in routings]).sum()
        return {DROPPED: (dropped.float(), chosen)}


def _like(routing: Routing, counts: Tensor) -> Tensor:
    return load_fractions(counts.to(routing.probability_sums.dtype))


def _added(terms: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()


def routers_of(model: nn.Module, sum_over_ranks: SumOverRanks) -> ModelRouters | None:
    """The routers of a model, or None if it has none."""
    layers = list(routed_layers(model).values())
    return ModelRouters(layers, sum_over_ranks) if layers else None
