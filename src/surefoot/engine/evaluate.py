"""Evaluation: exact for any batch size, and without a trace.

Numerators and denominators are summed over the whole set and divided once. Random state, modes and
gradients are as they were before; a padded sample has weight 0 and counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from surefoot.core.batches import batch_of_samples
from surefoot.core.errors import DataError
from surefoot.core.identity import identity
from surefoot.core.interruption import ShouldAbort, never
from surefoot.core.reports import EvalReport
from surefoot.data.batch import MicroBatch
from surefoot.engine.passes import TOTAL
from surefoot.engine.refusal import naming_batch
from surefoot.numerics.determinism import preserved_rng
from surefoot.numerics.modes import evaluation_mode
from surefoot.numerics.precision import Precision
from surefoot.tasks.metrics import MetricTotals, nothing_of
from surefoot.tasks.task import Task

SumOverRanks = Callable[[Tensor], Tensor]
"""Sums a tensor over the data-parallel ranks, in place."""

SumUp = Callable[[Iterable[MicroBatch]], tuple[MetricTotals, int]]
"""The metric sums of this rank's micro-batches, and their samples."""


class OpenSet(Protocol):
    """Opens a validation set from its start; each call gives the same micro-batches."""

    def __call__(self, *, should_abort: ShouldAbort) -> Generator[MicroBatch, None, None]:
        """The micro-batches; a wait for one raises `CutShort` where `should_abort()` says so."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    metrics: Mapping[str, float]
    weight: float
    """Loss-bearing items that the loss was averaged over."""
    samples: int


def evaluate(
    model: nn.Module,
    task: Task,
    micro_batches: Iterable[MicroBatch],
    precision: Precision,
    device: torch.device,
    sum_over_ranks: SumOverRanks = identity,
    sum_up: SumUp | None = None,
) -> Evaluation:
    """Evaluates `model` on every micro-batch, once.

    A rank that has run out of samples still runs its filler, since other ranks may wait for its
    forward; it counts for nothing.

    Args:
        sum_up: how it is done where `model` does not lie whole on this rank.

    Raises:
        DataError: there is no micro-batch.
    """
    with evaluation_mode(model), preserved_rng(device), torch.no_grad():
        if sum_up is None:
            totals, samples = one_by_one(model, task, micro_batches, precision)
        else:
            totals, samples = sum_up(micro_batches)
    if sum_over_ranks is not identity:
        counted = torch.tensor(samples, dtype=torch.int64, device=device)
        samples = int(sum_over_ranks(counted))
        totals.combine(sum_over_ranks)
    if samples == 0:
        raise DataError(
            "the validation set is empty",
            rule="an evaluation needs at least one sample",
            remedy="check the path or the split, or leave the validation set out",
        )
    return Evaluation(totals.ratios(), totals.denominator(TOTAL), samples)


def one_by_one(
    model: nn.Module, task: Task, micro_batches: Iterable[MicroBatch], precision: Precision
) -> tuple[MetricTotals, int]:
    """The metric sums of all micro-batches, and their samples."""
    totals = MetricTotals()
    samples = 0
    for micro_batch in micro_batches:
        # The filler of a rank that has run out of data holds one sample, and counts for nothing.
        counted = batch_of_samples(micro_batch.samples or 1)
        with precision.autocast(), naming_batch(micro_batch), counted:
            sums = task.metric_sums(model, micro_batch.data)
        totals.add(sums if micro_batch.samples else nothing_of(sums))
        samples += micro_batch.samples
    return totals, samples


@dataclass(frozen=True)
class Evaluator:
    """Evaluates one model on several validation sets.

    Args:
        use_weights: a context in which the model holds the weights to evaluate (raw or averaged).
        weights: their name in the report.
    """

    model: nn.Module
    task: Task
    sets: Mapping[str, OpenSet]
    precision: Precision
    device: torch.device
    use_weights: Callable[[], AbstractContextManager[object]]
    weights: str = "raw"
    sum_over_ranks: SumOverRanks = identity
    sum_up: SumUp | None = None

    def run(
        self,
        step: int,
        should_abort: ShouldAbort = never,
        before_batch: Callable[[], None] = lambda: None,
    ) -> list[EvalReport]:
        """One report for each set, in their order.

        Args:
            step: updates completed.
            should_abort: a wait for a batch is left where it says so.
            before_batch: called between two batches; it may leave the evaluation by raising.
        """
        reports = []
        with self.use_weights():
            for name, open_set in self.sets.items():
                began = time.perf_counter()
                with closing(open_set(should_abort=should_abort)) as micro_batches:
                    found = evaluate(
                        self.model,
                        self.task,
                        _after(before_batch, micro_batches),
                        self.precision,
                        self.device,
                        self.sum_over_ranks,
                        self.sum_up,
                    )
                reports.append(
                    EvalReport(
                        step=step,
                        name=name,
                        metrics=found.metrics,
                        weight=found.weight,
                        samples=found.samples,
                        weights=self.weights,
                        seconds=time.perf_counter() - began,
                        time=time.time(),
                    )
                )
        return reports


def _after(call: Callable[[], None], items: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    for item in items:
        call()
        yield item
