"""Multi-label classification: each label is present or not, independently of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from surefoot.core.errors import DataError, ModelError
from surefoot.tasks.calling import call_model, logits_of, target_mask_of, target_of
from surefoot.tasks.constants import ConstantTensor
from surefoot.tasks.losses import binary_cross_entropy_sum
from surefoot.tasks.task import Direction, MetricSums
from surefoot.tasks.value_checks import check_within, fitted_mask


@dataclass(frozen=True, eq=False)
class MultilabelTask:
    """Binary cross-entropy of each label, from logits, counted in elements.

    Targets are [B, L] in [0, 1] (or [B] for one label). A batch with names may hold `target_mask`
    ([B, L] or [B]), false where an element does not count.

    Args:
        num_labels: L.
        positive_weights: float [L], factor on the loss of present labels; the weight of a batch
            stays its count of elements, as in torch's mean.
        threshold: probability from which evaluation takes a label as present.

    >>> task = MultilabelTask(num_labels=3)
    >>> task.weight((torch.zeros(2, 5), torch.tensor([[1.0, 0, 1], [0, 0, 1]])))
    6.0
    """

    num_labels: int
    positive_weights: Tensor | None = None
    threshold: float = 0.5
    _weights: ConstantTensor | None = field(default=None, init=False, repr=False)

    unit: ClassVar[str] = "elements"
    deciding_metric: ClassVar[tuple[str, Direction]] = ("loss", "min")

    def __post_init__(self) -> None:
        weights = self.positive_weights
        if weights is not None and (
            weights.shape != (self.num_labels,) or not (weights.isfinite() & (weights >= 0)).all()
        ):
            raise ModelError(
                f"positive_weights: {weights.tolist()}",
                where="MultilabelTask",
                rule=f"one finite weight of at least 0 for each of {self.num_labels} labels",
            )
        if weights is not None:
            object.__setattr__(self, "_weights", ConstantTensor(weights))
        if not 0.0 < self.threshold < 1.0:
            raise ModelError(
                f"threshold = {self.threshold}",
                where="MultilabelTask",
                rule="a probability between 0 and 1",
            )

    def weight(self, batch: Any) -> float:
        """Elements of the target that count.

        Raises:
            DataError: there is no target, its shape is wrong, a counted element is outside
                [0, 1], or the mask does not fit.
        """
        target = self._target(batch)
        mask = fitted_mask(target, target_mask_of(batch))
        if mask is None:
            check_within("target", target, 0.0, 1.0)
            return float(target.numel())
        check_within("target", target.masked_fill(~mask, 0), 0.0, 1.0)
        return float(mask.sum())

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """Binary cross-entropy in nats, summed over the elements that count.

        Raises:
            ModelError: the model cannot be called, or its scores do not fit the target.
            DataError: the batch has no target, or one of a wrong shape.
        """
        return self._loss(*self._parts(model, batch))

    @torch.no_grad()
    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        """`loss`; `accuracy` of elements; `precision`, `recall` and `f1`, pooled over labels."""
        scores, target, mask = self._parts(model, batch)
        counted = torch.ones_like(target, dtype=torch.bool) if mask is None else mask
        present = (target > 0.5) & counted
        chosen = (scores.sigmoid() >= self.threshold) & counted
        hits = (present & chosen).sum()
        return {
            "loss": (self._loss(scores, target, mask), counted.sum()),
            "accuracy": (((present == chosen) & counted).sum(), counted.sum()),
            "precision": (hits, chosen.sum()),
            "recall": (hits, present.sum()),
            "f1": (2 * hits, chosen.sum() + present.sum()),
        }

    def _loss(self, scores: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        weights = None if self._weights is None else self._weights.on(scores.device)
        return binary_cross_entropy_sum(scores, target, mask, positive_weights=weights)

    def _target(self, batch: Any) -> Tensor:
        target = target_of(batch)
        if target.dim() == 1 and self.num_labels == 1:
            target = target.unsqueeze(-1)
        if target.dim() != 2 or target.shape[1] != self.num_labels:
            raise DataError(
                f"the target has shape {list(target.shape)}",
                where="target",
                rule=f"one number in [0, 1] for each label: [batch, {self.num_labels}]",
                remedy="give a row of zeros and ones for each sample, not class indices",
            )
        return target

    def _parts(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        target = self._target(batch)
        scores = logits_of(call_model(model, batch))
        if scores.dim() == 1 and self.num_labels == 1:
            scores = scores.unsqueeze(-1)
        if scores.shape != target.shape:
            raise ModelError(
                f"scores {list(scores.shape)} do not fit the target {list(target.shape)}",
                rule="one score for each element of the target; nothing is broadcast",
                remedy="correct num_labels, or the model's last layer",
            )
        return scores, target, fitted_mask(target, target_mask_of(batch))
