"""How the scores of every place become a loss sum and a count of right ones.

The meaning is the same for every way: the cross-entropy of the expected token. Ways differ in what
is held at once, and in which rank holds it. Nothing here shifts a label or divides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.tasks.calling import call_model, logits_of, signature_of
from surefoot.tasks.losses import chunked_cross_entropy_sum, sequence_cross_entropy_sum
from surefoot.tasks.metrics import correct_sum


@dataclass(frozen=True)
class Places:
    """A batch place by place: what the model is given there, and what it is to predict there."""

    inputs: dict[str, Any]
    """By name; `input_ids` [B, S] is one of them."""
    expected: Tensor
    """[B, S]: the next token, `IGNORE_INDEX` where none counts. It is shifted already."""


class Scoring(Protocol):
    """Runs a model on places and compares its scores with what is expected there."""

    def loss_sum(self, model: nn.Module, places: Places) -> Tensor:
        """0-dim: the cross-entropy in nats, summed over the places that count."""
        ...

    def loss_and_correct(self, model: nn.Module, places: Places) -> tuple[Tensor, Tensor]:
        """The loss sum, and how many places have their token as the highest score."""
        ...


@dataclass(frozen=True)
class WholeScores:
    """All scores at once.

    Args:
        vocabulary_size: V.
        cross_entropy: `(scores [B, S, V], expected [B, S]) -> sum`.
    """

    vocabulary_size: int
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = sequence_cross_entropy_sum

    def loss_sum(self, model: nn.Module, places: Places) -> Tensor:
        return self.cross_entropy(self._scores(model, places), places.expected)

    def loss_and_correct(self, model: nn.Module, places: Places) -> tuple[Tensor, Tensor]:
        scores, expected = self._scores(model, places), places.expected
        return self.cross_entropy(scores, expected), correct_sum(scores, expected)

    def _scores(self, model: nn.Module, places: Places) -> Tensor:
        scores = scores_of(model, places)
        if scores.dim() != 3 or scores.shape[:2] != places.expected.shape:
            raise ModelError(
                f"the model returned scores of shape {list(scores.shape)}",
                rule=f"scores of every place, [batch, sequence, vocabulary] = "
                f"{[*places.expected.shape, self.vocabulary_size]}",
                remedy="return the scores of all places, not of the last one",
            )
        return scores


def scores_of(model: nn.Module, places: Places) -> Tensor:
    """What the model returns for these places."""
    # A cache of keys and values is of no use here, and transformers fills one by default.
    return logits_of(call_model(model, places.inputs, use_cache=False))


FINISH = "finish"
"""Parameter of a forward that takes `(hidden [B, S, D], output layer) -> result`."""


@dataclass(frozen=True)
class ChunkedScores:
    """Scores of some places at a time, computed again in the backward.

    The model calls what it is given in the place of its output layer, inside its own forward.

    Args:
        rows: places whose scores are held at once.
    """

    rows: int

    def loss_sum(self, model: nn.Module, places: Places) -> Tensor:
        def finish(hidden: Tensor, head: nn.Module) -> Tensor:
            return chunked_cross_entropy_sum(hidden, head, places.expected, self.rows)

        result: Tensor = call_model(model, places.inputs, **{FINISH: finish})
        return result

    def loss_and_correct(self, model: nn.Module, places: Places) -> tuple[Tensor, Tensor]:
        def finish(hidden: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
            loss = chunked_cross_entropy_sum(hidden, head, places.expected, self.rows)
            rows = hidden.flatten(0, 1).split(self.rows)
            expected = places.expected.flatten().split(self.rows)
            right = [correct_sum(head(h), y) for h, y in zip(rows, expected, strict=True)]
            return loss, torch.stack(right).sum()

        pair: tuple[Tensor, Tensor] = call_model(model, places.inputs, **{FINISH: finish})
        return pair


def takes_finish(model: nn.Module) -> bool:
    """Whether a model lets its output layer be called by somebody else."""
    return FINISH in signature_of(model).names
