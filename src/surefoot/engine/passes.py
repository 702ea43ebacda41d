"""Passes: "run these micro-batches with these denominators". The step cannot tell them apart.

A pass leaves gradients in `.grad` and returns detached losses. It never steps, clips or zeroes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.data.batch import MicroBatch
from surefoot.engine.refusal import naming_batch
from surefoot.numerics.loss_scaling import LossScale
from surefoot.numerics.precision import Precision
from surefoot.tasks.task import Task

TOTAL = "loss"
"""Key of the whole loss in what a pass returns, and the only term of a loss that has one."""


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
            losses = divide_terms(sums, denominators)
            loss_scale.scale(losses[TOTAL]).backward()
            for term, loss in losses.items():
                seen = window_losses.get(term)
                window_losses[term] = loss.detach() if seen is None else seen + loss.detach()
        return window_losses


def divide_terms(
    sums: Tensor | Mapping[str, Tensor], denominators: Mapping[str, float]
) -> dict[str, Tensor]:
    """Divides each term's sum by its denominator and adds the terms up under `TOTAL`.

    A term whose denominator is 0 has no item in this window: its sum is 0 and stays so.

    Raises:
        ModelError: a sum is not a scalar, or a term has no denominator.
    """
    if isinstance(sums, Tensor):
        return {TOTAL: _scalar(sums, TOTAL) / (denominators[TOTAL] or 1.0)}
    if sums.keys() != denominators.keys():
        raise ModelError(
            f"the loss has the terms {sorted(sums)} but weights for {sorted(denominators)}",
            where="loss_sum",
            rule="each loss term has one weight, known before the forward",
            remedy="return the same keys from weight(batch) and loss_sum(model, batch)",
        )
    losses = {
        term: _scalar(value, term) / (denominators[term] or 1.0) for term, value in sums.items()
    }
    total = sum(losses.values())
    if not isinstance(total, Tensor):
        raise ModelError("the loss has no term", where="loss_sum", rule="at least one loss term")
    return {TOTAL: total, **losses}


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
