"""The pass over the stages of a pipeline, and the evaluation over them.

The micro-batches of a window are the pipeline's. Losses and metrics are known to the last stage,
and told to every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice

import torch
from torch import Tensor

from surefoot.core.batches import batch_of_samples
from surefoot.data.batch import MicroBatch
from surefoot.engine.passes import TOTAL, Seeds, WindowLosses
from surefoot.engine.relay import Reached, Relay, StageModel, refuse_unreached
from surefoot.numerics.loss_scaling import LossScale
from surefoot.numerics.modes import untouched_statistics
from surefoot.numerics.precision import Precision
from surefoot.parallel.pipeline import Pipeline, Stage
from surefoot.tasks.metrics import MetricTotals, nothing_of
from surefoot.tasks.task import Task


class PipelinePass:
    """Forward and backward of one window over the stages; every rank gets the losses.

    Args:
        pipeline: of this rank.
        share_buffers: gives replicas the same buffers, after each window.
        sum_over_ranks: sums a tensor over the data-parallel ranks, in place.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        task: Task,
        precision: Precision,
        share_buffers: Callable[[], None],
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        self.pipeline = pipeline
        self.task = task
        self.precision = precision
        self._share_buffers = share_buffers
        self._sum_over_ranks = sum_over_ranks
        self._seeds = Seeds()
        self._relay = Relay(pipeline, trains=True)
        self._models = {stage.index: StageModel(stage) for stage in pipeline.stages}

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        losses = WindowLosses(denominators, loss_scale, self._seeds)

        def train(stage: Stage, micro_batch: MicroBatch) -> Tensor:
            filler = micro_batch.samples == 0
            statistics = untouched_statistics(stage.model) if filler else nullcontext()
            try:
                with self.precision.autocast(), statistics:
                    sums = self.task.loss_sum(self._models[stage.index], micro_batch.data)
            except Reached as reached:
                return reached.hidden
            refuse_unreached(stage)
            terms, seeds = losses.add(sums, filler)
            return torch.stack([a * b for a, b in zip(terms, seeds, strict=True)]).sum()

        self.pipeline.follow_modes()
        self._relay(micro_batches, train)
        for sync in self.pipeline.syncs:
            sync.finish()
        self._share_buffers()
        # By name: the terms may come in another order on another rank.
        names = [TOTAL, *sorted(term for term in denominators if term != TOTAL)]
        here = [losses.values[name] for name in names] if losses.values else None
        told = self.pipeline.from_last(here, len(names))
        return dict(zip(names, self._sum_over_ranks(told).unbind(), strict=True))


class PipelineSums:
    """The metric sums of a set, on every rank: stages run forward, several micro-batches at once.

    Args:
        pipeline: of this rank.
    """

    def __init__(self, pipeline: Pipeline, task: Task, precision: Precision) -> None:
        self.pipeline = pipeline
        self.task = task
        self.precision = precision
        self._relay = Relay(pipeline, trains=False)
        self._models = {stage.index: StageModel(stage) for stage in pipeline.stages}

    def __call__(self, micro_batches: Iterable[MicroBatch]) -> tuple[MetricTotals, int]:
        """Sums over this rank's data, and its samples."""
        totals, samples = MetricTotals(), 0

        def measure(stage: Stage, micro_batch: MicroBatch) -> Tensor:
            try:
                counted = batch_of_samples(micro_batch.samples or 1)
                with self.precision.autocast(), counted:
                    sums = self.task.metric_sums(self._models[stage.index], micro_batch.data)
            except Reached as reached:
                return reached.hidden
            refuse_unreached(stage)
            totals.add(sums if micro_batch.samples else nothing_of(sums))
            return torch.zeros((), dtype=self.pipeline.dtype, device=self.pipeline.device)

        self.pipeline.follow_modes()
        left = iter(micro_batches)
        # So many keep all stages busy most of the time, and no more is kept.
        while at_once := list(islice(left, 2 * self.pipeline.order.num_stages)):
            self._relay(at_once, measure)
            samples += sum(micro_batch.samples for micro_batch in at_once)
        return (self._told(totals) if samples else totals), samples

    def _told(self, totals: MetricTotals) -> MetricTotals:
        """Those of the last stage."""
        here = totals.names
        names = tuple(json.loads(self.pipeline.text_from_last(json.dumps(here) if here else None)))
        numbers = totals.stacked().flatten().unbind() if here else None
        told = self.pipeline.from_last(numbers, 2 * len(names))
        return MetricTotals.of(names, told.view(len(names), 2))
