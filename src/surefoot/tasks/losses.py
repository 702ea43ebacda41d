"""Losses as sums over a batch. Nothing here divides, and nothing here waits for a device.

Each sum but the chunked one is one torch call with `reduction="sum"`, so that a naive loop gets the
same bits. Half
precision inputs are widened to float32 first; float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORE_INDEX = -100
"""Label of an item that bears no loss; torch's and transformers' convention."""
SmoothingForm = Literal["uniform_k", "k_minus_1"]


def widened(values: Tensor) -> Tensor:
    """Float32 of a half-precision tensor; any other tensor as it is.

    Autocast would make the same copy inside the loss; doing it here also covers models that are
    wholly in half precision.
    """
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Sum of `-w[y] * log softmax(logits)[y]`, computed through log-sum-exp from the logits.

    Args:
        logits: [N, C], or [N, C, ...]; raw scores, not probabilities.
        labels: [N], or [N, ...]; class indices, `IGNORE_INDEX` where an item does not count.
        class_weights: [C] on the device of the logits, or None for 1 each.
        label_smoothing: epsilon in torch's form, see `smoothed_targets`.
    """
    scores = widened(logits)
    return F.cross_entropy(
        scores,
        labels,
        weight=None if class_weights is None else class_weights.to(scores.dtype),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def shift_labels(labels: Tensor) -> Tensor:
    """Labels moved one place left: place t holds the token that position t has to predict.

    Args:
        labels: [B, S], aligned with the input tokens.

    Returns:
        [B, S]; the last place, which has nothing to predict, holds `IGNORE_INDEX`. Moving the
        labels instead of cutting the logits spares a copy of the logits.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def sequence_cross_entropy_sum(logits: Tensor, expected: Tensor) -> Tensor:
    """Cross-entropy sum over the places of sequences.

    Args:
        logits: [B, S, V].
        expected: [B, S], what each place predicts: labels that `shift_labels` has moved.
    """
    return cross_entropy_sum(logits.flatten(0, 1), expected.flatten())


def chunked_cross_entropy_sum(
    hidden: Tensor, head: Callable[[Tensor], Tensor], expected: Tensor, rows: int
) -> Tensor:
    """`sequence_cross_entropy_sum(head(hidden), expected)` with few scores held at once.

    Neither all scores nor their gradient are ever there: each chunk's are computed in the forward,
    given up, and computed again in the backward, for one more product with the output matrix.
    The sum is that of the chunks' sums, so that its last bits differ.

    Args:
        hidden: [B, S, D], what enters the output layer.
        head: the output layer, [n, D] to [n, V].
        expected: [B, S], as for `sequence_cross_entropy_sum`.
        rows: places in a chunk.
    """

    def chunk_sum(chunk: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy_sum(head(chunk), labels)

    parts = zip(hidden.flatten(0, 1).split(rows), expected.flatten().split(rows), strict=True)
    if not torch.is_grad_enabled():
        return torch.stack([chunk_sum(*part) for part in parts]).sum()
    # No random number is drawn in a chunk.
    kept: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.stack([checkpoint(chunk_sum, *part, **kept) for part in parts]).sum()


def squared_error_sum(predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of `(prediction - target)^2` over all elements, or those where `mask` is true."""
    predictions, targets = _prepared(predictions, targets, mask)
    return F.mse_loss(predictions, targets, reduction="sum")


def absolute_error_sum(predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of `|prediction - target|` over all elements, or those where `mask` is true."""
    predictions, targets = _prepared(predictions, targets, mask)
    return F.l1_loss(predictions, targets, reduction="sum")


def huber_sum(
    predictions: Tensor, targets: Tensor, mask: Tensor | None = None, *, delta: float = 1.0
) -> Tensor:
    """Sum of Huber's loss: `e^2 / 2` up to `|e| = delta`, then `delta * (|e| - delta / 2)`.

    Source: Huber, "Robust estimation of a location parameter", 1964.
    """
    predictions, targets = _prepared(predictions, targets, mask)
    return F.huber_loss(predictions, targets, reduction="sum", delta=delta)


def binary_cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    positive_weights: Tensor | None = None,
) -> Tensor:
    """Sum of binary cross-entropies computed from logits (log-sum-exp, finite at any logit).

    Args:
        logits: [B, L]; raw scores, not probabilities.
        targets: [B, L] in [0, 1].
        mask: bool [B, L]; None counts every element.
        positive_weights: [L] on the device of the logits, factor on the positive part; None for
            1 each.
    """
    scores = widened(logits)
    targets = targets.to(scores.dtype)
    weight = None
    if mask is not None:
        weight = mask.to(scores.dtype)
        targets = torch.where(mask, targets, torch.zeros_like(targets))
    if positive_weights is not None:
        positive_weights = positive_weights.to(scores.dtype)
    return F.binary_cross_entropy_with_logits(
        scores, targets, weight=weight, pos_weight=positive_weights, reduction="sum"
    )


def _prepared(predictions: Tensor, targets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Same dtype for both; where the mask is false both are equal, so that the error is exactly 0.

    A masked target may hold anything, NaN included: it is never part of the arithmetic.
    """
    predictions = widened(predictions)
    targets = targets.to(predictions.dtype)
    if mask is not None:
        targets = torch.where(mask, targets, torch.zeros_like(targets))
        predictions = torch.where(mask, predictions, targets)
    return predictions, targets


def smoothed_targets(num_classes: int, epsilon: float, form: SmoothingForm) -> Tensor:
    """Table of smoothed targets: row y is the target distribution of class y.

    Args:
        num_classes: K.
        epsilon: mass taken off the true class.
        form: `uniform_k` spreads epsilon over all K classes: true class `1 - eps + eps / K`,
            others `eps / K` (torch's `label_smoothing`, and what the classification task does;
            Szegedy et al. 2016, eq. 7). `k_minus_1` spreads it over the others only: true class
            `1 - eps`, others `eps / (K - 1)`; it equals `uniform_k` with `eps * K / (K - 1)`.

    Returns:
        float64 [K, K]; every row sums to 1.

    >>> smoothed_targets(3, 0.1, "uniform_k")[1].tolist()
    [0.03333333333333333, 0.9333333333333333, 0.03333333333333333]
    >>> smoothed_targets(3, 0.1, "k_minus_1")[1].tolist()
    [0.05, 0.9, 0.05]
    """
    off = epsilon / num_classes if form == "uniform_k" else epsilon / (num_classes - 1)
    on = 1.0 - epsilon + (off if form == "uniform_k" else 0.0)
    table = torch.full((num_classes, num_classes), off, dtype=torch.float64)
    return table.fill_diagonal_(on)
