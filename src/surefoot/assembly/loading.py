"""From data sets and settings to loaders: which rank reads what, and how. Reads no sample but one.

A run of several ranks is cut so that all of them together see the windows that one would see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from surefoot.assembly.flop_count import sample_flops
from surefoot.config.sections import Settings
from surefoot.core.counting import Pace
from surefoot.core.doors import GIVEN, Door, find_part, handed_in, label_of
from surefoot.core.errors import RequestError
from surefoot.core.targets import call
from surefoot.data.augment import preserved_cpu_rng
from surefoot.data.fetch import collated
from surefoot.data.loader import Loader, LoaderSettings
from surefoot.data.order import IN_ORDER, SHUFFLED, BatchPlan, SampleOrder
from surefoot.data.plan import DataPlan
from surefoot.data.samplers import as_order
from surefoot.data.sources.base import Source
from surefoot.data.sources.stream import StreamPlan, StreamSource, first_samples, refuse_stream
from surefoot.parallel.layout import ALONE, Place
from surefoot.tasks.task import Task, main_weight


def make_order(source: Source | StreamSource, settings: Settings, given: Any = None) -> SampleOrder:
    """The order of the samples that the settings ask for.

    Args:
        given: the sampler that was handed in, where the settings say so.

    Raises:
        RequestError: it cannot be made of this data, or the data is a stream.
    """
    section = settings.sampler
    if isinstance(source, StreamSource):
        if section.kind != "shuffled":
            raise RequestError(
                f"a stream comes in its own order, and the sampler is {section.kind}",
                where="sampler.kind",
                rule="a sampler chooses samples by index",
                remedy="leave it out, or give a map-style dataset",
            )
        return SHUFFLED
    if section.kind == GIVEN:
        with preserved_cpu_rng():
            return as_order(handed_in(given, "sampler", section.target), source)
    found = find_part(Door.SAMPLERS, section, "sampler")
    name = label_of(Door.SAMPLERS, section)
    # It may read every sample, and none of their draws is the training's.
    with preserved_cpu_rng():
        return as_order(call(found, (source,), section.arguments, name, "sampler"), source)


def make_plan(
    source: Source | StreamSource,
    settings: Settings,
    place: Place = ALONE,
    order: SampleOrder = SHUFFLED,
) -> DataPlan:
    """How each epoch of the training set is cut into windows, and which part is this rank's.

    Raises:
        RequestError: short windows of a stream shall be dropped, or several ranks would read it.
    """
    train = settings.train
    if isinstance(source, StreamSource):
        if place.num_data_ranks > 1:
            raise RequestError(
                f"{place.num_data_ranks} data-parallel ranks would all read one stream",
                where="data",
                rule="a stream has one state and is read by one rank",
                remedy="give a map-style dataset, or train on one rank",
            )
        if train.short_batch == "drop":
            raise RequestError(
                "a stream cannot drop its short last window",
                where="train.short_batch",
                rule="where a stream ends is known only when it has ended",
                remedy="use train.short_batch=keep; the short window has its right denominator",
            )
        return StreamPlan(train.micro_batch, train.accumulation, settings.seed)
    return BatchPlan(
        num_samples=len(source),
        micro_batch=train.micro_batch,
        window_length=train.accumulation,
        seed=settings.seed,
        order=order,
        drop_short=train.short_batch == "drop",
        rank=place.data_rank,
        num_ranks=place.num_data_ranks,
    )


def make_pace(
    source: Source | StreamSource,
    task: Task,
    plan: DataPlan,
    model: nn.Module,
    settings: Settings,
) -> Pace:
    """What one update consumes. Tokens a sample are those of the first sample's batch."""
    flops = sample_flops(model, task, source, settings)
    tokens = None
    if task.unit == "tokens" and (first := first_samples(source, 1)):
        weight = task.weight(collated(source, first, [0]))
        tokens = weight if isinstance(weight, float) else main_weight(weight)
    return Pace(
        samples_per_update=plan.samples_per_window,
        num_samples=plan.epoch_length,
        drop_short=plan.drop_short,
        tokens_per_sample=tokens,
        flops_per_sample=flops.value,
        flops_unknown=flops.unknown,
    )


def make_loader_settings(settings: Settings) -> LoaderSettings:
    """The loader section, as the loader takes it."""
    section = settings.loader
    return LoaderSettings(
        workers=section.workers,
        pin_memory=section.pin_memory,
        prefetch=section.prefetch,
        deadline_seconds=float(section.deadline.value),
    )


def make_eval_loader(
    source: Source,
    task: Task,
    settings: Settings,
    loader_settings: LoaderSettings,
    device: torch.device,
    place: Place = ALONE,
) -> Loader:
    """A loader that reads this rank's part of a validation set once, in its own order."""
    refuse_stream(source)
    size = settings.evaluate.micro_batch
    micro_batch = settings.train.micro_batch if size == "as-in-training" else int(size)
    plan = BatchPlan(
        len(source),
        micro_batch,
        seed=settings.seed,
        order=IN_ORDER,
        rank=place.data_rank,
        num_ranks=place.num_data_ranks,
    )
    return Loader(source, plan, weight=task.weight, settings=loader_settings, device=device)
