"""Vocabulary-parallel logits: next-token loss without gathering them.

Along the tensor axis each rank has the logits of its own vocabulary entries. Ranks exchange a few
numbers per position: the largest logit, the sum of exponentials, the logit of the target
(Megatron-LM, Shoeybi et al. 2019, section 3). Labels are shifted elsewhere; divides nothing.
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
    """Logits of a model whose output layer gives each rank those of its own vocabulary entries.

    Args:
        group: the ranks with the other vocabulary entries of the same positions.
            Each holds the same number of entries, in rank order.
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
                f"the model returned logits of shape {list(scores.shape)}",
                where="parallel.cut_logits",
                rule=f"logits of all positions, {[*places.expected.shape]}, of this rank",
                remedy="return the logits of all positions, not of the last one",
            )
        return scores


def vocabulary_parallel_cross_entropy_sum(
    scores: Tensor, expected: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Cross-entropy of the targets, summed over the positions that count.

    Args:
        scores: logits [B, S, V / ranks] of this rank's entries; converted to float32 first.
        expected: target ids [B, S] over the full vocabulary; `IGNORE_INDEX` where none counts.
        group: the ranks with the other vocabulary entries.

    Returns:
        0-dim, the same on every rank. Its gradient is with respect to this rank's logits.
    """
    rows = widened(scores.flatten(0, -2))
    apply: Any = _VocabularyParallelCrossEntropy.apply
    result: Tensor = apply(rows, expected.flatten(), group)
    return result


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """`log sum exp(x) - x[y]` over the full vocabulary; backward `softmax(x) - one_hot(y)`."""

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
    """Number of positions that count whose target has the highest logit over all ranks.

    Ties go to the lowest id. 0-dim int64, the same on every rank.
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
    """Indices into this rank's entries (0 if the target is elsewhere), and whether it is here."""
    own = expected - dist.get_rank(group) * num_own
    is_here = (own >= 0) & (own < num_own)
    return own * is_here, is_here
