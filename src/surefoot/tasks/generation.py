"""Next-token prediction: labels aligned with the tokens, shifted exactly once, here.

It never pads, packs or masks: what counts is written in the labels by whoever made the batch. Once
the labels are shifted each place stands for itself, so that a layout may cut the sequence.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from surefoot.core.errors import DataError, ModelError
from surefoot.tasks.calling import find_target, named_entries, target_mask_of
from surefoot.tasks.constants import ConstantTensor
from surefoot.tasks.losses import IGNORE_INDEX, sequence_cross_entropy_sum, shift_labels
from surefoot.tasks.scoring import Places, Scoring, WholeScores
from surefoot.tasks.task import Direction, MetricSums
from surefoot.tasks.value_checks import check_indices, fitted_mask


@dataclass(frozen=True, eq=False)
class GenerationTask:
    """Cross-entropy of the next token, counted in tokens.

    A batch holds `input_ids` [B, S] and may hold `labels` [B, S], **aligned** with the tokens (the
    label at t is the token at t, or -100 where it does not count), `target_mask` (false where a
    token is no target), `document_ids`, `position_ids` and `attention_mask`. A tensor, or a tuple
    (input_ids,) or (input_ids, labels), will do as well. Without labels every token counts
    except those that `attention_mask` leaves out and, with `document_ids`, the first of each
    document, which nothing in its document predicts.

    Args:
        vocabulary_size: V; ids lie in [0, V).
        bytes_per_token: integer [V], length of each token in UTF-8 bytes; with it, evaluation
            reports `bits_per_byte`, which does not depend on the tokenizer.
        compile_loss: run the loss through `torch.compile`, which spares float32 copies of the
            scores. On one H100 an update of GPT-2 124M (16 x 1024 tokens, compiled blocks) went
            from 50 to 38 ms and from 16 to 10 GiB. Sums may differ in the last bits.

    >>> task = GenerationTask(vocabulary_size=10)
    >>> task.weight({"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])})  # Two predicted a row.
    4.0
    """

    vocabulary_size: int
    bytes_per_token: Tensor | None = None
    compile_loss: bool = False
    _bytes: ConstantTensor | None = field(default=None, init=False, repr=False)
    scoring: Scoring = field(init=False, repr=False)
    """What the loss is computed with; see `scored_by`."""

    unit: ClassVar[str] = "tokens"
    deciding_metric: ClassVar[tuple[str, Direction]] = ("loss", "min")

    def __post_init__(self) -> None:
        table = self.bytes_per_token
        if table is not None and table.shape != (self.vocabulary_size,):
            raise ModelError(
                f"bytes_per_token has shape {list(table.shape)}",
                rule=f"one length for each token of the vocabulary: [{self.vocabulary_size}]",
                remedy="build the table from the tokenizer that made the data",
            )
        if table is not None:
            object.__setattr__(self, "_bytes", ConstantTensor(table))
        cross_entropy = sequence_cross_entropy_sum
        if self.compile_loss:
            cross_entropy = torch.compile(cross_entropy)
        object.__setattr__(self, "scoring", WholeScores(self.vocabulary_size, cross_entropy))

    def __reduce__(self) -> tuple[Any, ...]:
        # A compiled function does not cross a process border; a worker needs no loss anyway.
        return type(self), (self.vocabulary_size, self.bytes_per_token, self.compile_loss)

    def weight(self, batch: Any) -> float:
        """Tokens that are predicted and count: labels from the second place on, less -100.

        Raises:
            DataError: wrong shape, an id out of range, or labels that look shifted already.
        """
        input_ids, labels = tokens_and_labels(batch)
        check_indices("input_ids", input_ids, self.vocabulary_size, ignorable=False)
        if labels is not input_ids:
            check_indices("labels", labels, self.vocabulary_size, ignorable=True)
            _check_not_shifted(input_ids, labels)
        return float((labels[:, 1:] != IGNORE_INDEX).sum())

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy in nats, summed over the tokens that `weight` counts.

        Raises:
            ModelError: the model cannot be called, or its scores are not [B, S, V].
        """
        return self.loss_of(model, self.places(batch))

    @torch.no_grad()
    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        """`loss` (nats a token), `accuracy`, and `bits_per_byte` where lengths are known."""
        return self.metrics_of(model, self.places(batch))

    def places(self, batch: Any) -> Places:
        """The batch with its labels shifted; looks at no value.

        Raises:
            DataError: there are no tokens, or a shape is wrong.
        """
        _, labels = tokens_and_labels(batch)
        named = named_entries(batch)
        inputs = {"input_ids": _first(batch)} if named is None else named
        return Places(inputs, shift_labels(labels))

    def loss_of(self, model: nn.Module, places: Places) -> Tensor:
        """The loss sum over these places, which may be a part of each sequence.

        Raises:
            ModelError: the model cannot be called, or its scores are not [B, S, V].
        """
        return self.scoring.loss_sum(model, places)

    @torch.no_grad()
    def metrics_of(self, model: nn.Module, places: Places) -> MetricSums:
        """The metric sums over these places, which may be a part of each sequence."""
        expected = places.expected
        loss, correct = self.scoring.loss_and_correct(model, places)
        counted = expected != IGNORE_INDEX
        num_tokens = counted.sum()
        sums: MetricSums = {
            "loss": (loss, num_tokens),
            "accuracy": (correct, num_tokens),
        }
        if self._bytes is not None:
            lengths = self._bytes.on(expected.device)[expected.clamp(min=0)]
            sums["bits_per_byte"] = (loss / math.log(2.0), (lengths * counted).sum())
        return sums

    def scored_by(self, scoring: Scoring) -> GenerationTask:
        """The same task, computed in another way."""
        same = copy(self)
        object.__setattr__(same, "scoring", scoring)
        return same


def tokens_and_labels(batch: Any) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] and the labels aligned with them [B, S]; looks at no value.

    Raises:
        DataError: there are no tokens, or a shape is wrong.
    """
    named = named_entries(batch)
    input_ids = named.get("input_ids") if named is not None else _first(batch)
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        shape = list(input_ids.shape) if isinstance(input_ids, Tensor) else "not there"
        raise DataError(
            f"input_ids: {shape}",
            rule="token ids are a tensor [batch, sequence]",
            remedy="name them input_ids, or give them as the first entry of a tuple",
        )
    labels = find_target(batch)
    if labels is None:
        labels = _labels_from(input_ids, named or {})
    if not isinstance(labels, Tensor) or labels.shape != input_ids.shape:
        shape = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise DataError(
            f"labels: {shape}",
            rule=f"labels are aligned with input_ids: {list(input_ids.shape)}",
            remedy="give one label for each token (-100 where it does not count), not shifted",
        )
    mask = fitted_mask(labels, target_mask_of(batch))
    return input_ids, labels if mask is None else labels.masked_fill(~mask, IGNORE_INDEX)


def _labels_from(input_ids: Tensor, named: dict[str, Any]) -> Tensor:
    labels = input_ids
    attention_mask = named.get("attention_mask")
    if attention_mask is not None:
        labels = labels.masked_fill(attention_mask == 0, IGNORE_INDEX)
    document_ids = named.get("document_ids")
    if document_ids is not None:
        starts = torch.zeros_like(document_ids, dtype=torch.bool)
        starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        labels = labels.masked_fill(starts, IGNORE_INDEX)
    return labels


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def _check_not_shifted(input_ids: Tensor, labels: Tensor) -> None:
    """Refuses labels that equal the next token everywhere and the own token not everywhere."""
    counted = labels[:, :-1] != IGNORE_INDEX
    is_next = ((labels[:, :-1] == input_ids[:, 1:]) | ~counted).all()
    is_own = ((labels == input_ids) | (labels == IGNORE_INDEX)).all()
    if is_next and not is_own and counted.any():
        raise DataError(
            "the labels are shifted already: each equals the next token",
            where="labels",
            rule="labels are aligned with input_ids; the task shifts them, once",
            remedy="give labels equal to input_ids (or leave them out)",
        )
