"""A task whose model routes tokens to experts: the terms of the routers stand beside its own loss.

A task knows no model: the routers are handed in. Their terms are sums over tokens, with the tokens
as their weight, like any other term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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

OWN = "loss"
"""Name of the task's own loss where others stand beside it."""


class RouterLoads(Protocol):
    """How often each expert was chosen in a window."""

    def counting(self) -> AbstractContextManager[None]:
        """Inside, what is routed counts for the window."""
        ...

    def measures(self) -> dict[str, Tensor]:
        """Numbers of the window by name. Every rank asks for it alike."""
        ...

    def update(self, finite: Callable[[], Tensor]) -> None:
        """What follows an update, where `finite()` is true."""
        ...


class Routers(Protocol):
    """The routers of a model."""

    @property
    def loads(self) -> RouterLoads: ...

    terms: tuple[str, ...]
    """Names of what `loss_sums` gives."""
    depends_on_split: Mapping[str, str]
    """Terms that are another loss under another split, and why."""

    def listening(self) -> AbstractContextManager[Any]:
        """Inside, one forward leaves its routings."""
        ...

    def loss_sums(self, routings: Any) -> dict[str, Tensor]:
        """Sums over the tokens of that forward, with their weights multiplied in."""
        ...

    def metric_sums(self, routings: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Sums for evaluation."""
        ...


class RouterTask(TaskWrapper):
    """A task whose loss also has the terms of the routers.

    `loss` stays the task's own loss; the routers' terms are trained with it and reported apart.
    Each is a mean over the tokens of the window, added up over the layers.
    """

    def __init__(self, task: Task, routers: Routers) -> None:
        super().__init__(task)
        self.routers = routers

    @property
    def depends_on_split(self) -> Mapping[str, str]:
        """Terms that are another loss under another split, and why."""
        return {**split_dependence(self.task), **self.routers.depends_on_split}

    def weight(self, batch: Any) -> Weight:
        """The task's own, and the tokens of the batch for each of the routers' terms."""
        return self.weight_of(self.task)(batch)

    def weight_of(self, task: Task) -> Callable[[Any], Weight]:
        """How batches of `task` are weighed with these routers. It holds no model, for workers."""
        return RoutedWeight(task, self.routers.terms)

    def loss_sum(self, model: nn.Module, batch: Any) -> LossSum:
        """The task's own loss, and the sums over the tokens of the routers' terms."""
        with self.routers.listening() as routings:
            own = self.task.loss_sum(model, batch)
        return {**_by_term(own), **self.routers.loss_sums(routings)}

    @torch.no_grad()
    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        """The task's own, and those of the routers."""
        with self.routers.listening() as routings:
            sums = self.task.metric_sums(model, batch)
        return {**sums, **self.routers.metric_sums(routings)}


@dataclass(frozen=True)
class RoutedWeight:
    """The weight of a batch with that of the routers' terms."""

    task: Task
    terms: tuple[str, ...]

    def __call__(self, batch: Any) -> Weight:
        """The task's own, and the tokens of the batch for each of the terms."""
        own = _by_term(self.task.weight(batch))
        return {**own, **dict.fromkeys(self.terms, count_tokens(batch))}


def _by_term(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {OWN: value}


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
