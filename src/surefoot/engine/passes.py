"""Passes: "run these micro-batches with these denominators". The step cannot tell them apart.

A pass leaves gradients in `.grad` and returns detached losses. It never steps, clips or zeroes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from surefoot.core.errors import ModelError
from surefoot.data.batch import MicroBatch
from surefoot.engine.in_flight import DETAIL
from surefoot.engine.refusal import naming_batch
from surefoot.numerics.loss_scaling import LossScale
from surefoot.numerics.modes import untouched_statistics
from surefoot.numerics.precision import Precision
from surefoot.parallel.layout import GradientSync
from surefoot.tasks.task import Task

TOTAL = "loss"
"""Key of the whole loss in what a pass returns, and the only term of a loss that has one.

Of a loss of several terms, one may have this name: it is the loss proper, reported alone under it;
the others are trained with it and reported apart."""

RESERVED = frozenset({"grad_norm", "loss_scale", "weight_norm"})
"""Names that no term of a loss may have: the numbers of an update that go to the log beside it."""


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


class Reduction(Protocol):
    """What a pass does together with the other ranks."""

    def micro_batch(self, filler: bool, is_last: bool) -> AbstractContextManager[object]:
        """The context of the forward and backward of one micro-batch of a window."""
        ...

    def finish(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """After the last backward: gradients are whole in `.grad`; returns the window's losses."""
        ...


class NoReduction:
    """There is one rank."""

    def micro_batch(self, filler: bool, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        return losses


class RankReduction:
    """Gradients are reduced as `sync` says, losses summed.

    Args:
        model: whose running statistics a filler leaves alone.
        sync: when gradients are reduced.
        share_buffers: gives all ranks the same buffers, after each window.
        sum_over_ranks: sums a tensor over the data-parallel ranks, in place.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: GradientSync,
        share_buffers: Callable[[], None],
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        self._model = model
        self._sync = sync
        self._share_buffers = share_buffers
        self._sum_over_ranks = sum_over_ranks

    @contextmanager
    def micro_batch(self, filler: bool, is_last: bool) -> Iterator[None]:
        statistics = untouched_statistics(self._model) if filler else nullcontext()
        with self._sync.micro_batch(is_last), statistics:
            yield

    def finish(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        self._sync.finish()
        self._share_buffers()
        # By name: the terms of a loss may come in another order on another rank.
        names = sorted(losses)
        summed = self._sum_over_ranks(torch.stack([losses[name] for name in names]))
        by_name = dict(zip(names, summed.unbind(), strict=True))
        return {name: by_name[name] for name in losses}


NO_REDUCTION = NoReduction()


class PlainPass:
    """Forward and backward of one micro-batch after the other.

    Args:
        model: what is called: the module, or a wrapper that reduces its gradients.
        reduction: what is done together with the other ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        precision: Precision,
        reduction: Reduction = NO_REDUCTION,
    ) -> None:
        self.model = model
        self.task = task
        self.reduction = reduction
        self._autocast = precision.autocast
        self._seeds = Seeds()

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        losses = WindowLosses(denominators, loss_scale, self._seeds)
        for index, micro_batch in enumerate(micro_batches, start=1):
            filler = micro_batch.samples == 0
            with self.reduction.micro_batch(filler, index == len(micro_batches)):
                with self._autocast(), naming_batch(micro_batch):
                    sums = self.task.loss_sum(self.model, micro_batch.data)
                torch.autograd.backward(*losses.add(sums, filler))
        return self.reduction.finish(losses.values)


class EnclosedPass:
    """A pass inside a context.

    Args:
        context: makes it, for each window.
    """

    def __init__(self, run_pass: Pass, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._run_pass = run_pass
        self._context = context

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        with self._context():
            return self._run_pass(micro_batches, denominators, loss_scale)


@dataclass(eq=False)
class WindowLosses:
    """The losses of one window, added up over its micro-batches.

    Args:
        seeds: of the pass; kept from window to window.
    """

    denominators: Mapping[str, float]
    loss_scale: LossScale
    seeds: Seeds
    values: dict[str, Tensor] = field(default_factory=dict)
    """What a pass returns: each term's sum over its denominator, and their total."""

    def add(
        self, sums: Tensor | Mapping[str, Tensor], filler: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Adds the loss sums of one micro-batch; returns them, and the seeds of their backward.

        The backward is that of sum / denominator, whose derivative is the same for every item: a
        seed, so that the division needs no node of its own in the graph.

        Args:
            filler: whether it is that of a rank that has run out of data, which is run because the
                other ranks wait for its part, and counts for nothing.
        """
        terms, denominators = loss_terms(sums, self.denominators), self.denominators
        seeds = [self.seeds.of(denominators[t], terms[t], self.loss_scale) for t in terms]
        # A term whose denominator is 0 has no item in this window: its sum is 0 and stays so.
        losses = {t: terms[t].detach() / (denominators[t] or 1.0) for t in terms}
        if TOTAL not in losses:
            losses = {TOTAL: _total(losses), **losses}
        if filler:
            losses, seeds = _zeros_like(losses, seeds)
        for term, loss in losses.items():
            self.values[term] = self.values[term] + loss if term in self.values else loss
        return list(terms.values()), seeds


class Seeds:
    """`loss scale / denominator` as 0-dim tensors; made anew only when the denominator changes."""

    def __init__(self) -> None:
        self._latest: dict[tuple[torch.dtype, torch.device], tuple[float, Tensor]] = {}

    def of(self, denominator: float, like: Tensor, loss_scale: LossScale) -> Tensor:
        """For a loss sum of the number type and on the device of `like`."""
        key = like.dtype, like.device
        known, fraction = self._latest.get(key, (None, like))
        if known != denominator or not isinstance(loss_scale.value, float):
            one = torch.ones((), dtype=like.dtype, device=like.device)
            fraction = loss_scale.scale(one) / (denominator or 1.0)
            self._latest[key] = denominator, fraction
        return fraction


def loss_terms(
    sums: Tensor | Mapping[str, Tensor], denominators: Mapping[str, float]
) -> Mapping[str, Tensor]:
    """The sum of each term of the loss, by name; `TOTAL` where there is one.

    Raises:
        ModelError: a sum is not a scalar with a gradient, a term has no denominator, or its name is
            taken.
    """
    terms = {TOTAL: sums} if isinstance(sums, Tensor) else _named_terms(sums)
    if terms.keys() != denominators.keys():
        raise _other_terms(terms, denominators)
    for term, value in terms.items():
        if value.ndim or not value.requires_grad:
            raise _no_loss(value, term)
    return terms


def _zeros_like(
    losses: Mapping[str, Tensor], seeds: Sequence[Tensor]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    zeros = {term: torch.zeros_like(loss) for term, loss in losses.items()}
    return zeros, [torch.zeros_like(seed) for seed in seeds]


def _total(losses: Mapping[str, Tensor]) -> Tensor:
    total = sum(losses.values())
    assert isinstance(total, Tensor)
    return total


def _named_terms(sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    taken = sorted(term for term in sums if term in RESERVED or term.startswith(DETAIL))
    if taken:
        raise ModelError(
            f"a loss term may not be called {taken[0]!r}",
            where="loss_sum",
            rule=f"the log has numbers of its own: {', '.join(sorted(RESERVED))} and {DETAIL}*",
            remedy="rename the term, in weight(batch) too",
        )
    if not sums:
        raise ModelError("the loss has no term", where="loss_sum", rule="at least one loss term")
    return sums


def _other_terms(terms: Mapping[str, Tensor], denominators: Mapping[str, float]) -> ModelError:
    return ModelError(
        f"the loss has the terms {sorted(terms)} but weights for {sorted(denominators)}",
        where="loss_sum",
        rule="each loss term has one weight, known before the forward",
        remedy="return the same keys from weight(batch) and loss_sum(model, batch)",
    )


def _no_loss(value: Tensor, term: str) -> ModelError:
    if value.ndim == 0:
        return ModelError(
            "the loss does not depend on any trainable parameter",
            where=f"loss term '{term}'",
            rule="the loss is computed by the model with gradients on",
            remedy="check for .detach(), torch.no_grad() or a fully frozen model",
        )
    return ModelError(
        f"the loss has shape {tuple(value.shape)}",
        where=f"loss term '{term}'",
        rule="a loss is one scalar: the sum over the items of the batch",
        remedy="sum it: loss.sum(); the engine divides by the window's weight",
    )
