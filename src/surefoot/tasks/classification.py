"""Classification: one class of several for each item. It never looks at a value during training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from surefoot.core.errors import DataError, ModelError
from surefoot.tasks.calling import call_model, logits_of, target_mask_of, target_of
from surefoot.tasks.constants import ConstantTensor, widest
from surefoot.tasks.losses import IGNORE_INDEX, cross_entropy_sum
from surefoot.tasks.metrics import correct_sum
from surefoot.tasks.task import Direction, MetricSums
from surefoot.tasks.value_checks import check_indices, fitted_mask


@dataclass(frozen=True, eq=False)
class ClassificationTask:
    """Cross-entropy over classes.

    Targets are class indices: [B] beside scores [B, C]; [B, S] beside [B, S, C] (classes of
    tokens); [B, H, W] beside [B, C, H, W] (classes of pixels). -100 leaves an item out, and so does
    a false entry of `target_mask` (the target's shape, or [B]) in a batch with names.

    Args:
        num_classes: C; labels lie in [0, C).
        label_smoothing: epsilon in torch's form: the true class gets `1 - eps + eps / C`, every
            other `eps / C`. The form that gives the others `eps / (C - 1)` and the true class
            `1 - eps` is this one with `eps * C / (C - 1)`; see `losses.smoothed_targets`.
        class_weights: float [C]; the weight of a batch is then the sum of its labels' weights.
        top_k: evaluation also reports `top_K_accuracy` for each K of these.

    >>> task = ClassificationTask(num_classes=3)
    >>> task.weight((torch.zeros(4, 5), torch.tensor([0, 2, -100, 1])))
    3.0
    """

    num_classes: int
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None
    top_k: tuple[int, ...] = ()
    _weights: ConstantTensor | None = field(default=None, init=False, repr=False)

    unit: ClassVar[str] = "samples"
    deciding_metric: ClassVar[tuple[str, Direction]] = ("accuracy", "max")

    def __post_init__(self) -> None:
        broken = []
        if not 0.0 <= self.label_smoothing < 1.0:
            broken.append(f"label_smoothing = {self.label_smoothing} is not in [0, 1)")
        weights = self.class_weights
        if weights is not None and weights.shape != (self.num_classes,):
            broken.append(f"class_weights have shape {list(weights.shape)}")
        elif weights is not None and not (weights.isfinite() & (weights >= 0)).all():
            broken.append("class_weights are not all finite and at least 0")
        if any(not 1 <= k <= self.num_classes for k in self.top_k):
            broken.append(f"top_k = {list(self.top_k)}")
        if broken:
            raise ModelError(
                "this classification task cannot be built: " + "; ".join(broken),
                where="ClassificationTask",
                rule=f"one weight and at most one rank for each of {self.num_classes} classes",
                remedy="correct the named arguments",
            )
        if weights is not None:
            object.__setattr__(self, "_weights", ConstantTensor(weights.double()))

    def weight(self, batch: Any) -> float:
        """Items that count, or the sum of their class weights.

        Raises:
            DataError: labels are not class indices in [0, num_classes).
        """
        labels = counted_labels(batch)
        check_indices("labels", labels, self.num_classes, ignorable=True)
        return float(self._weight(labels.long()))

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy in nats, summed over the items that count.

        Raises:
            ModelError: the model cannot be called, or its scores do not fit the labels.
            DataError: the batch has no target.
        """
        return self._loss(*self._scores_and_labels(model, batch))

    @torch.no_grad()
    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        """`loss`, `accuracy`, `top_K_accuracy`; `cross_entropy` where the loss is not it.

        `loss` is what training minimises, with its smoothing and class weights; `cross_entropy` is
        free of both.
        """
        scores, labels = self._scores_and_labels(model, batch)
        counted = (labels != IGNORE_INDEX).sum()
        sums: MetricSums = {"loss": (self._loss(scores, labels), self._weight(labels))}
        sums["accuracy"] = (correct_sum(scores, labels), counted)
        for k in self.top_k:
            sums[f"top_{k}_accuracy"] = (correct_sum(scores, labels, top_k=k), counted)
        if self.label_smoothing > 0 or self.class_weights is not None:
            sums["cross_entropy"] = (cross_entropy_sum(scores, labels), counted)
        return sums

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        weights = None
        if self._weights is not None:
            weights = self._weights.on(scores.device, widest(scores.device))
        return cross_entropy_sum(
            scores, labels, class_weights=weights, label_smoothing=self.label_smoothing
        )

    def _weight(self, labels: Tensor) -> Tensor:
        counted = labels != IGNORE_INDEX
        if self._weights is None:
            return counted.sum()
        weights = self._weights.on(labels.device, widest(labels.device))
        return (weights[labels.clamp(min=0)] * counted).sum()

    def _scores_and_labels(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Scores [N, C] and labels [N]."""
        labels = counted_labels(batch)
        scores = logits_of(call_model(model, batch))
        if scores.dim() == 4 and labels.dim() == 3:
            scores = scores.movedim(1, -1)
        if scores.shape == (*labels.shape, self.num_classes):
            return scores.reshape(-1, self.num_classes), labels.reshape(-1).long()
        if labels.shape == (*scores.shape[:-1], 1):
            raise DataError(
                f"labels have shape {list(labels.shape)}",
                rule=f"class indices of the shape {list(scores.shape[:-1])}",
                remedy="drop the last dim: labels.squeeze(-1)",
            )
        raise ModelError(
            f"scores {list(scores.shape)} do not fit labels {list(labels.shape)}",
            rule=f"scores of {self.num_classes} classes for each label: "
            f"{[*labels.shape, self.num_classes]}",
            remedy="correct num_classes, the model's last layer or the shape of the labels",
        )


def counted_labels(batch: Any) -> Tensor:
    """The labels, and -100 where the batch's `target_mask` leaves one out.

    Raises:
        DataError: there are none, or the mask does not fit them.
    """
    labels = target_of(batch)
    mask = fitted_mask(labels, target_mask_of(batch))
    return labels if mask is None else labels.long().masked_fill(~mask, IGNORE_INDEX)
