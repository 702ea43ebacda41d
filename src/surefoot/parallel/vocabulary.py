"""Scores that stay cut over the vocabulary: the loss of next tokens without gathering them.

Along the tensor axis each rank has the scores of its own words. What travels is a few numbers a
place: the largest score, the sum of exponentials, the score of the expected word (Megatron-LM,
Shoeybi et al. 2019, section 3). Labels are shifted elsewhere, and nothing here divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.tasks.losses import IGNORE_INDEX, widened
from surefoot.tasks.scoring import Places, scores_of


@dataclass(frozen=True)
class VocabularyParallelScores:
    """Scores of a model whose output layer gives each rank those of its own words.

    Args:
        group: the ranks with the other words of the same places.
            Each has as many words as the others, in the order of the ranks.
    """

    group: dist.ProcessGroup

    def loss_sum(self, model: nn.Module, places: Places) -> Tensor:
        """The same on each rank of the group."""
        return vocabulary_parallel_cross_entropy_sum(
            self._scores(model, places), places.expected, self.group
        )

    def loss_and_correct(self, model: nn.Module, places: Places) -> tuple[Tensor, Tensor]:
        """The same on each rank of the group."""
        scores, expected = self._scores(model, places), places.expected
        loss = vocabulary_parallel_cross_entropy_sum(scores, expected, self.group)
        return loss, vocabulary_parallel_correct_sum(scores, expected, self.group)

    def _scores(self, model: nn.Module, places: Places) -> Tensor:
        scores = scores_of(model, places)
        if scores.dim() != 3 or scores.shape[:2] != places.expected.shape:
            raise ModelError(
                f"the model returned scores of shape {list(scores.shape)}",
                where="parallel.cut_logits",
                rule=f"scores of every place, {[*places.expected.shape]}, for this rank's words",
                remedy="return the scores of all places, not of the last one",
            )
        return scores


def vocabulary_parallel_cross_entropy_sum(
    scores: Tensor, expected: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Cross-entropy of the expected words, summed over the places that count.

    Args:
        scores: [B, S, V / ranks], of this rank's words; widened to float32 first.
        expected: [B, S], words of all ranks; `IGNORE_INDEX` where none counts.
        group: the ranks with the other words.

    Returns:
        0-dim, the same on every rank. Its gradient is that of this rank's scores.
    """
    rows = widened(scores.flatten(0, -2))
    result: Tensor = _CutCrossEntropy.apply(rows, expected.flatten(), group)
    return result


class _CutCrossEntropy(torch.autograd.Function):
    """`log sum exp(x) - x[y]` over all ranks' words; backward `softmax(x) - one_hot(y)`."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, expected: Tensor, group: dist.ProcessGroup) -> Tensor:
        peak = scores.amax(dim=-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        own, is_here = own_words(expected, scores.shape[-1], group)
        exponentials = scores - peak.unsqueeze(-1)
        picked = exponentials.gather(-1, own.unsqueeze(-1)).squeeze(-1) * is_here
        exponentials.exp_()
        parts = torch.stack([exponentials.sum(dim=-1), picked])
        dist.all_reduce(parts, op=dist.ReduceOp.SUM, group=group)
        totals, picked = parts.unbind()
        counted = expected != IGNORE_INDEX
        ctx.save_for_backward(exponentials, totals, own, is_here, counted)
        return torch.where(counted, totals.log() - picked, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        exponentials, totals, own, is_here, counted = ctx.saved_tensors
        factor = counted * gradients[0]
        gradient = exponentials * (factor / totals).unsqueeze(-1)
        gradient.scatter_add_(-1, own.unsqueeze(-1), (-factor * is_here).unsqueeze(-1))
        return gradient, None, None


def vocabulary_parallel_correct_sum(
    scores: Tensor, expected: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """How many places that count have their word as the highest score over all ranks.

    Of equal scores the first word counts. 0-dim int64, the same on every rank.
    """
    highest, place = scores.max(dim=-1)
    peak = highest.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    num_own = scores.shape[-1]
    first = dist.get_rank(group) * num_own
    nowhere = num_own * group.size()
    word = torch.where(highest == peak, place + first, nowhere)
    dist.all_reduce(word, op=dist.ReduceOp.MIN, group=group)
    return ((word == expected) & (expected != IGNORE_INDEX)).sum()


def own_words(expected: Tensor, num_own: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Indices into this rank's words (0 where the word is elsewhere), and whether it is here."""
    own = expected - dist.get_rank(group) * num_own
    is_here = (own >= 0) & (own < num_own)
    return own * is_here, is_here
