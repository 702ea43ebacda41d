"""What the training of a model with experts needs beside its task: router losses, loads, biases.

A task knows no model, so the router's terms are added here. They are sums over tokens with the
tokens as their weight, like any other term. Nothing here looks at how the experts are spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from surefoot.data.batch import MicroBatch
from surefoot.engine.passes import TOTAL, Pass
from surefoot.models.moe import (
    RoutedFeedForward,
    Routing,
    balance_sum,
    bias_change,
    heard,
    load_fractions,
    routed_layers,
)
from surefoot.numerics.loss_scaling import LossScale
from surefoot.tasks.calling import named_entries
from surefoot.tasks.task import (
    LossSum,
    MetricSums,
    Task,
    Weight,
    count_samples,
    split_dependence,
)
from surefoot.tasks.wrapper import TaskWrapper

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


class RouterLoads:
    """How often each expert was chosen in a window, and the biases that follow.

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
        """Inside, what is routed counts for the window; what was counted before is forgotten."""
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
        """Moves the biases of the layers that balance by them, where `finite()` is true."""
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
        """Counts of all layers over all ranks; added up once a window."""
        if self._of_all is None:
            assert self._own is not None
            self._of_all = self._sum_over_ranks(self._own.clone())
        return self._of_all[:-1]


class RouterTask(TaskWrapper):
    """A task whose loss also has the terms of the routers.

    `loss` stays the task's own loss; `balance` and `router_z` stand beside it with their weights
    multiplied in, are trained with it and reported apart. Each is a mean over the tokens of the
    window, added up over the layers.

    Args:
        task: of the model.
        model: the bare module, with routed layers.
        sum_over_ranks: sums a tensor over the data-parallel ranks, in place.
    """

    def __init__(self, task: Task, model: nn.Module, sum_over_ranks: SumOverRanks) -> None:
        super().__init__(task)
        self._layers: Sequence[RoutedFeedForward] = list(routed_layers(model).values())
        self._sum_over_ranks = sum_over_ranks
        self.loads = RouterLoads(self._layers, sum_over_ranks)
        self._balances = any(layer.config.has_balance_loss for layer in self._layers)
        self._drops = any(layer.depends_on_split for layer in self._layers)
        has_z = any(layer.config.z_weight > 0 for layer in self._layers)
        self.terms = (BALANCE,) * self._balances + (ROUTER_Z,) * has_z

    @property
    def depends_on_split(self) -> Mapping[str, str]:
        """Terms that are another loss under another split, and why."""
        own = split_dependence(self.task)
        return {**own, BALANCE: OF_TOGETHER} if self._balances else own

    def weight(self, batch: Any) -> Weight:
        """The task's own, and the tokens of the batch for each of the routers' terms."""
        return RoutedWeight(self.task, self.terms)(batch)

    def loss_sum(self, model: nn.Module, batch: Any) -> LossSum:
        """The task's own loss, and the sums over the tokens of the routers' terms."""
        with heard(self._layers) as routings:
            own = self.task.loss_sum(model, batch)
        return {**_by_term(own), **self._router_terms(routings)}

    @torch.no_grad()
    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        """The task's own; with a capacity also the share of choices that were dropped."""
        with heard(self._layers) as routings:
            sums = self.task.metric_sums(model, batch)
        if not self._drops:
            return sums
        dropped = torch.stack([routing.num_dropped for routing in routings]).sum()
        chosen = torch.stack([routing.counts.sum() for routing in routings]).sum()
        return {**sums, DROPPED: (dropped.float(), chosen)}

    def _router_terms(self, routings: Sequence[Routing]) -> dict[str, Tensor]:
        counts = torch.cat([routing.counts for routing in routings])
        dropped = torch.stack([routing.num_dropped for routing in routings]).sum()
        if not self._layers[0].takes_statistics:
            # The filler of a rank that has run out of data: it meets the others and counts not.
            counts, dropped = torch.zeros_like(counts), torch.zeros_like(dropped)
        self.loads.add(counts, dropped)
        pairs = list(zip(self._layers, routings, strict=True))
        terms: dict[str, Tensor] = {}
        if self._balances:
            of_all = self._sum_over_ranks(counts).split([len(r.counts) for r in routings])
            terms[BALANCE] = _added(
                layer.config.balance_weight * balance_sum(r.probability_sums, _like(r, c))
                for (layer, r), c in zip(pairs, of_all, strict=True)
                if layer.config.has_balance_loss
            )
        if ROUTER_Z in self.terms:
            terms[ROUTER_Z] = _added(layer.config.z_weight * r.z_sum for layer, r in pairs)
        return terms


@dataclass(frozen=True)
class RoutedWeight:
    """The weight of a batch with that of the routers' terms. It holds no model, for workers."""

    task: Task
    terms: tuple[str, ...]

    def __call__(self, batch: Any) -> Weight:
        """The task's own, and the tokens of the batch for each of the terms."""
        own = _by_term(self.task.weight(batch))
        return {**own, **dict.fromkeys(self.terms, count_tokens(batch))}


def _by_term(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {TOTAL: value}


def _like(routing: Routing, counts: Tensor) -> Tensor:
    return load_fractions(counts.to(routing.probability_sums.dtype))


def _added(terms: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()


def count_tokens(batch: Any) -> float:
    """Tokens of the batch's `input_ids` (or first tensor) [B, S]; samples where it has none."""
    named = named_entries(batch)
    if named is not None:
        ids = named.get("input_ids")
    else:
        ids = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
        return float(ids.numel())
    return count_samples(batch)


def with_routers(task: Task, model: nn.Module, sum_over_ranks: SumOverRanks) -> Task:
    """The task, with the terms of the routers where the model has any."""
    return RouterTask(task, model, sum_over_ranks) if routed_layers(model) else task


def weight_of(task: Task, trained: Task) -> Callable[[Any], Weight]:
    """How batches of `task` are weighed where what is trained is `trained`."""
    return RoutedWeight(task, trained.terms) if isinstance(trained, RouterTask) else task.weight


def loads_of(task: Task) -> RouterLoads | None:
    """The loads of a task with routers; None for any other."""
    return task.loads if isinstance(task, RouterTask) else None


class CountedPass:
    """A pass whose routing counts; one that is run again to look for a fault does not."""

    def __init__(self, run_pass: Pass, loads: RouterLoads) -> None:
        self._run_pass = run_pass
        self._loads = loads

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        with self._loads.counting():
            return self._run_pass(micro_batches, denominators, loss_scale)


class Follower(Protocol):
    """What follows an update."""

    def update(self, finite: Callable[[], Tensor]) -> None: ...


class Followers:
    """Several things that follow an update, in their order."""

    def __init__(self, *followers: Follower) -> None:
        self._followers = followers

    def update(self, finite: Callable[[], Tensor]) -> None:
        for follower in self._followers:
            follower.update(finite)
