"""Passes: "run these micro-batches with these denominators". The step cannot tell them apart.

A pass leaves gradients in `.grad` and returns detached losses. It never steps, clips or zeroes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.data.batch import MicroBatch
from surefoot.engine.refusal import naming_batch
from surefoot.numerics.loss_scaling import LossScale
from surefoot.numerics.modes import untouched_statistics
from surefoot.numerics.precision import Precision
from surefoot.parallel.layout import GradientSync
from surefoot.tasks.task import Task

TOTAL = "loss"
"""Key of the whole loss in what a pass returns, and the only term of a loss that has one.

Of a loss of several terms, one may have this name: it is the loss proper, reported alone under it;
the others are trained with it and reported apart."""


class Pass(Protocol):
    """Runs the forward and backward of one window."""

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        """Accumulates the gradients of `sum over terms of (loss sum / denominator)`.

        Returns:
            The window's loss under `TOTAL` and, for a loss of several terms, each term: detached
            0-dim tensors on the model's device, not multiplied by the loss scale.
        """
        ...


class PlainPass:
    """Forward and backward of one micro-batch after the other, on one rank."""

    def __init__(self, model: nn.Module, task: Task, precision: Precision) -> None:
        self.model = model
        self.task = task
        self.precision = precision
        self._seeds = Seeds()

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        window_losses: dict[str, Tensor] = {}
        for micro_batch in micro_batches:
            with self.precision.autocast(), naming_batch(micro_batch):
                sums = self.task.loss_sum(self.model, micro_batch.data)
            terms = loss_terms(sums, denominators)
            # `backward` of sum / denominator, whose derivative is the same for every item: it is
            # the seed, and the division needs no node of its own in the graph.
            seeds = [
                self._seeds.of(denominators[term], loss_sum, loss_scale)
                for term, loss_sum in terms.items()
            ]
            torch.autograd.backward(list(terms.values()), seeds)
            for term, loss in divided(terms, denominators).items():
                seen = window_losses.get(term)
                window_losses[term] = loss if seen is None else seen + loss
        return window_losses


class RanksPass:
    """`PlainPass` on several ranks: gradients are reduced as `sync` says, losses summed.

    A micro-batch of a rank that has run out of data counts for nothing: it is run because the other
    ranks wait for its part, with a seed of 0, and leaves running statistics alone.

    Args:
        model: what is called: the module, or a wrapper that reduces its gradients.
        sync: when gradients are reduced.
        share_buffers: gives all ranks the same buffers, after each window.
        sum_over_ranks: sums a tensor over the data-parallel ranks, in place.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        precision: Precision,
        sync: GradientSync,
        share_buffers: Callable[[], None],
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        self.model = model
        self.task = task
        self.precision = precision
        self.sync = sync
        self._share_buffers = share_buffers
        self._sum_over_ranks = sum_over_ranks
        self._seeds = Seeds()
        self.forward_seconds = 0.0
        """Host time of all forwards so far."""

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        window_losses: dict[str, Tensor] = {}
        for index, micro_batch in enumerate(micro_batches):
            is_filler = micro_batch.samples == 0
            statistics = untouched_statistics(self.model) if is_filler else nullcontext()
            with self.sync.micro_batch(index == len(micro_batches) - 1), statistics:
                began = time.perf_counter()
                with self.precision.autocast(), naming_batch(micro_batch):
                    sums = self.task.loss_sum(self.model, micro_batch.data)
                self.forward_seconds += time.perf_counter() - began
                terms = loss_terms(sums, denominators)
                seeds = [
                    self._seeds.of(denominators[term], loss_sum, loss_scale)
                    for term, loss_sum in terms.items()
                ]
                if is_filler:
                    seeds = [torch.zeros_like(seed) for seed in seeds]
                torch.autograd.backward(list(terms.values()), seeds)
            for term, loss in divided(terms, denominators).items():
                counted = torch.zeros_like(loss) if is_filler else loss
                seen = window_losses.get(term)
                window_losses[term] = counted if seen is None else seen + counted
        self.sync.finish()
        self._share_buffers()
        # By name: the terms of a loss may come in another order on another rank.
        names = sorted(window_losses)
        summed = self._sum_over_ranks(torch.stack([window_losses[name] for name in names]))
        by_name = dict(zip(names, summed.unbind(), strict=True))
        return {name: by_name[name] for name in window_losses}


class Seeds:
    """`loss scale / denominator` as 0-dim tensors; made anew only when the denominator changes."""

    def __init__(self) -> None:
        self._latest: dict[tuple[torch.dtype, torch.device], tuple[float, Tensor]] = {}

    def of(self, denominator: float, like: Tensor, loss_scale: LossScale) -> Tensor:
        """For a loss sum of the number type and on the device of `like`."""
        key = like.dtype, like.device
        known, fraction = self._latest.get(key, (None, like))
        if known != denominator or not isinstance(loss_scale.value, float):
            one = torch.ones((), dtype=like.dtype, device=like.device)
            fraction = loss_scale.scale(one) / (denominator or 1.0)
            self._latest[key] = denominator, fraction
        return fraction


def loss_terms(
    sums: Tensor | Mapping[str, Tensor], denominators: Mapping[str, float]
) -> dict[str, Tensor]:
    """The sum of each term of the loss, by name; `TOTAL` where there is one.

    Raises:
        ModelError: a sum is not a scalar with a gradient, or a term has no denominator.
    """
    if isinstance(sums, Tensor):
        sums = {TOTAL: sums}
    if sums.keys() != denominators.keys():
        raise ModelError(
            f"the loss has the terms {sorted(sums)} but weights for {sorted(denominators)}",
            where="loss_sum",
            rule="each loss term has one weight, known before the forward",
            remedy="return the same keys from weight(batch) and loss_sum(model, batch)",
        )
    if not sums:
        raise ModelError("the loss has no term", where="loss_sum", rule="at least one loss term")
    return {term: _scalar(value, term) for term, value in sums.items()}


def divided(terms: Mapping[str, Tensor], denominators: Mapping[str, float]) -> dict[str, Tensor]:
    """Each term over its denominator, detached, and their total under `TOTAL`.

    A term whose denominator is 0 has no item in this window: its sum is 0 and stays so.
    """
    losses = {term: value.detach() / (denominators[term] or 1.0) for term, value in terms.items()}
    if TOTAL not in losses:
        total = sum(losses.values())
        assert isinstance(total, Tensor)
        return {TOTAL: total, **losses}
    return losses


def _scalar(value: Tensor, term: str) -> Tensor:
    if value.ndim == 0 and value.requires_grad:
        return value
    if value.ndim == 0:
        raise ModelError(
            "the loss does not depend on any trainable parameter",
            where=f"loss term '{term}'",
            rule="the loss is computed by the model with gradients on",
            remedy="check for .detach(), torch.no_grad() or a fully frozen model",
        )
    raise ModelError(
        f"the loss has shape {tuple(value.shape)}",
        where=f"loss term '{term}'",
        rule="a loss is one scalar: the sum over the items of the batch",
        remedy="sum it: loss.sum(); the engine divides by the window's weight",
    )
