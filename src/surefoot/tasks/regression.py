"""Regression: numbers for each sample, counted in elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.tasks.calling import call_model, logits_of, target_mask_of, target_of
from surefoot.tasks.losses import absolute_error_sum, huber_sum, squared_error_sum
from surefoot.tasks.task import Direction, MetricSums
from surefoot.tasks.value_checks import check_finite, fitted_mask


@dataclass(frozen=True)
class RegressionTask:
    """Squared, absolute or Huber loss, over the elements of the target.

    Predictions have the shape of the target; [B, 1] beside a target [B] is the same thing and is
    taken so. A batch with names may hold `target_mask` (the target's shape, or [B]), false where
    an element does not count.

    Args:
        loss: `mse`, `mae` or `huber`.
        delta: where Huber's loss turns from squared to absolute; used by it alone.

    >>> task = RegressionTask(loss="huber", delta=0.5)
    >>> task.weight((torch.zeros(4, 2), torch.zeros(4)))
    4.0
    """

    loss: Literal["mse", "mae", "huber"] = "mse"
    delta: float = 1.0

    unit: ClassVar[str] = "elements"
    deciding_metric: ClassVar[tuple[str, Direction]] = ("loss", "min")

    def __post_init__(self) -> None:
        if self.loss not in ("mse", "mae", "huber") or not 0 < self.delta < float("inf"):
            raise ModelError(
                f"no regression has loss {self.loss!r} and delta {self.delta}",
                where="RegressionTask",
                rule="loss is mse, mae or huber; delta is positive",
            )

    def weight(self, batch: Any) -> float:
        """Elements of the target that count.

        Raises:
            DataError: there is no target, a counted element is not finite, or the mask does not
                fit.
        """
        target = target_of(batch)
        mask = fitted_mask(target, target_mask_of(batch))
        if mask is None:
            check_finite("target", target)
            return float(target.numel())
        check_finite("target", target.masked_fill(~mask, 0))
        return float(mask.sum())

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """Loss summed over the elements that count.

        Raises:
            ModelError: the model cannot be called, or predictions do not fit the target.
            DataError: the batch has no target.
        """
        return self._loss(*self._parts(model, batch))

    @torch.no_grad()
    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        """`loss`, `mse` and `mae`."""
        predictions, target, mask = self._parts(model, batch)
        counted = float(target.numel()) if mask is None else mask.sum()
        return {
            "loss": (self._loss(predictions, target, mask), counted),
            "mse": (squared_error_sum(predictions, target, mask), counted),
            "mae": (absolute_error_sum(predictions, target, mask), counted),
        }

    def _loss(self, predictions: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        if self.loss == "mse":
            return squared_error_sum(predictions, target, mask)
        if self.loss == "mae":
            return absolute_error_sum(predictions, target, mask)
        return huber_sum(predictions, target, mask, delta=self.delta)

    def _parts(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        target = target_of(batch)
        predictions = logits_of(call_model(model, batch))
        if predictions.shape == (*target.shape, 1):
            predictions = predictions.squeeze(-1)
        if predictions.shape != target.shape:
            raise ModelError(
                f"predictions {list(predictions.shape)} do not fit the target {list(target.shape)}",
                rule="one prediction for each element of the target; nothing is broadcast",
                remedy="correct the model's last layer, or the shape of the target",
            )
        return predictions, target, fitted_mask(target, target_mask_of(batch))
