"""Ring attention over parts of sequences: keys and values are passed around the ranks.

Each rank keeps the queries of its own positions. The keys and values of one part after the other
pass by (Liu et al. 2023, arXiv 2310.01889); partial results are merged with the log-sum-exp of the
scores, as flash attention merges blocks (Dao 2023, arXiv 2307.08691, 3.1). The next part is sent
while this one is computed. No heads are exchanged, so their number need not divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from surefoot.core.errors import RequestError

_aten = torch.ops.aten


class Ring:
    """The ranks that hold parts of the same sequences, each sending to the next.

    Args:
        group: the ranks, in the order of the parts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def parts(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(source rank, part) pairs, this rank's own first; the next is received meanwhile."""
        for turn in range(self.size):
            is_last = turn == self.size - 1
            coming = None if is_last else self.pass_on(own)
            yield (self.rank - turn) % self.size, own
            if coming is not None:
                own = coming()

    def pass_on(self, own: Tensor) -> Callable[[], Tensor]:
        """Starts sending to the next rank; the returned function waits for the previous rank's."""
        came = torch.empty_like(own)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, came, group=self.group, group_peer=before),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return came

        return wait


def pass_around(module: nn.Module, ring: Ring) -> None:
    """Replaces the attention of a module by ring attention, in place; its name stays.

    Args:
        module: takes query, key, value [B, H, s, D] of this rank's positions and a mask of all
            positions [B, 1, S, S] (True where a position may attend; None: causal).

    Raises:
        RequestError: it uses attention dropout.
    """
    dropout = getattr(module, "dropout", 0.0)
    if dropout:
        raise RequestError(
            f"the ring exchanges keys and values, and attention dropout is {dropout:g}",
            where="parallel.context_exchange",
            rule="which attention weights are dropped would depend on how the sequence is split",
            remedy="use parallel.context_exchange=all-to-all, or no dropout in attention",
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        apply: Any = _RingAttention.apply
        mixed: Tensor = apply(query, key, value, mask, ring)
        return mixed

    module.forward = attend


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring
    ) -> Tensor:
        part = _part_for(query, mask)
        total = torch.zeros_like(query, dtype=part.sum_dtype)
        log_sum = query.new_full(query.shape[:3], -math.inf, dtype=part.sum_dtype)
        seeds: Sequence[Any] = ()
        with torch.autocast(query.device.type, enabled=False):
            for source, pairs in ring.parts(torch.stack((key, value))):
                visible = _Visible(ring.rank, source, mask, query.shape[2])
                if visible.is_nothing:
                    continue
                mixed, log_part, seeds = part.forward(query, *_grouped(query, pairs), visible)
                joined = torch.logaddexp(log_sum, log_part)
                before, now = _share(log_sum, joined), _share(log_part, joined)
                total = before.unsqueeze(-1) * total + now.unsqueeze(-1) * mixed
                log_sum = joined
        result = total.to(query.dtype)
        context.save_for_backward(query, key, value, mask, result, log_sum)
        context.ring, context.part, context.seeds = ring, part, seeds
        return result

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, result, log_sum = context.saved_tensors
        ring, part = context.ring, context.part
        ends = (gradient.contiguous(), result, log_sum, context.seeds)
        own = torch.stack((key, value))
        of_query = torch.zeros_like(query, dtype=part.sum_dtype)
        # The gradient of each part travels with it and is back home after a full round.
        of_pairs = torch.zeros_like(own, dtype=part.sum_dtype)
        with torch.autocast(query.device.type, enabled=False):
            for source, pairs in ring.parts(own):
                visible = _Visible(ring.rank, source, mask, query.shape[2])
                if not visible.is_nothing:
                    here, *there = part.backward(query, *_grouped(query, pairs), visible, ends)
                    of_query += here
                    of_pairs += torch.stack([_ungrouped(one, key) for one in there])
                of_pairs = ring.pass_on(of_pairs)()
        of_key, of_value = of_pairs.to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None


class _Visible:
    """Which positions of one part may attend to which of another."""

    def __init__(self, own: int, source: int, mask: Tensor | None, length: int) -> None:
        self.is_own = own == source
        self.is_nothing = mask is None and source > own
        self._mask = mask
        self._own = slice(own * length, (own + 1) * length)
        self._source = slice(source * length, (source + 1) * length)

    def hidden(self, scores: Tensor) -> Tensor:
        """`scores` [B, H, s, s] with minus infinity where attention is masked."""
        if self._mask is not None:
            return scores.masked_fill(~self._mask[:, :, self._own, self._source], -math.inf)
        if self.is_own:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            return scores.masked_fill(ahead, -math.inf)
        return scores


class _Products:
    """Attention on one part by matrix products: any device, any mask; materializes scores."""

    def __init__(self, query: Tensor) -> None:
        self.sum_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self._scale = query.shape[-1] ** -0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, visible: _Visible
    ) -> tuple[Tensor, Tensor, tuple[()]]:
        query, key, value = (t.to(self.sum_dtype) for t in (query, key, value))
        scores = visible.hidden(query @ key.mT * self._scale)
        log_sum = scores.logsumexp(-1)
        return _share(scores, log_sum.unsqueeze(-1)) @ value, log_sum, ()

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, visible: _Visible, ends: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, result, log_sum, _ = ends
        query, key, value, gradient, result = (
            t.to(self.sum_dtype) for t in (query, key, value, gradient, result)
        )
        scores = visible.hidden(query @ key.mT * self._scale)
        weights = _share(scores, log_sum.unsqueeze(-1))
        of_weights = gradient @ value.mT - (gradient * result).sum(-1, keepdim=True)
        of_scores = weights * of_weights * self._scale
        return of_scores @ key, of_scores.mT @ query, weights.mT @ gradient


class _Flash:
    """Attention on one part by torch's flash attention; its backward takes the merged result."""

    sum_dtype = torch.float32

    def __init__(self, query: Tensor) -> None:
        self._scale = query.shape[-1] ** -0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, visible: _Visible
    ) -> tuple[Tensor, Tensor, Sequence[Any]]:
        mixed, log_sum, *rest = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, visible.is_own, False, scale=self._scale
        )
        return mixed, log_sum, rest[:6]

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, visible: _Visible, ends: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, result, log_sum, seeds = ends
        *sizes, seed, offset = seeds
        found: tuple[Tensor, Tensor, Tensor]
        found = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, result, log_sum, *sizes, 0.0, visible.is_own, seed, offset,
            scale=self._scale,
        )  # fmt: skip
        return found


MAX_FLASH_HEAD_DIM = 256
"""Largest head dim of torch's flash attention; must be a multiple of 8."""


def _part_for(query: Tensor, mask: Tensor | None) -> _Products | _Flash:
    width = query.shape[-1]
    fits = width % 8 == 0 and width <= MAX_FLASH_HEAD_DIM
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if mask is None and query.is_cuda and is_half and fits:
        return _Flash(query)
    return _Products(query)


def _grouped(query: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, s, D], repeated to one head per query head."""
    key, value = pairs.repeat_interleave(query.shape[1] // pairs.shape[2], dim=2)
    return key, value


def _ungrouped(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient [B, H, s, D] summed over repeated heads."""
    out: Tensor = gradient.unflatten(1, (like.shape[1], -1)).sum(2)
    return out


def _share(logs: Tensor, log_sums: Tensor) -> Tensor:
    """`exp(logs - log_sums)`; 0 where both are minus infinity."""
    return (logs - torch.where(log_sums == -math.inf, 0.0, log_sums)).exp()
