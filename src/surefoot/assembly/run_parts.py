"""From a model, data and a task, with settings, to the parts of one run. Reads no recipe, no file.

Everything that a run is made of is chosen here, once, in the order in which it is used; all that
can be refused is refused. Nothing is trained and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from surefoot.assembly.cadences import Cadences, make_cadences
from surefoot.assembly.compilation import (
    BEFORE_THERE_WAS_A_CHOICE,
    Compilation,
    choose_compilation,
    keep_compilation,
)
from surefoot.assembly.deciding import deciding_metric
from surefoot.assembly.given_parts import NOTHING_GIVEN, GivenParts
from surefoot.assembly.loading import (
    make_eval_loader,
    make_loader_settings,
    make_order,
    make_pace,
    make_plan,
)
from surefoot.assembly.process import Process, seed_rank
from surefoot.assembly.task_layout import place_task, weight_of
from surefoot.assembly.update_parts import Trainable, make_trainable, make_update
from surefoot.config.building import make_schedule
from surefoot.config.sections import Settings
from surefoot.core.counting import Pace, updates_in
from surefoot.core.identity import identity
from surefoot.core.interruption import ShouldAbort, never
from surefoot.core.reports import Observer
from surefoot.core.schedules import Schedule, Undecided
from surefoot.data.batch import MicroBatch
from surefoot.data.fetch import collated
from surefoot.data.loader import Loader
from surefoot.data.order import position_of
from surefoot.data.plan import DataPlan
from surefoot.data.sources.base import Source
from surefoot.data.sources.stream import first_samples
from surefoot.engine.decisions import Decisions
from surefoot.engine.evaluate import Evaluator, evaluate
from surefoot.engine.interrupt import Agreement
from surefoot.engine.reporting import Investigation, no_findings
from surefoot.engine.step import Update
from surefoot.engine.sum_check import NUM_SAMPLES, FewSamples, check_sums
from surefoot.engine.window import Window, over_ranks, windows
from surefoot.numerics.determinism import preserved_rng
from surefoot.optim.ema import NoAverage
from surefoot.parallel.collectives import HostSums
from surefoot.parallel.compilation import uncompiled
from surefoot.parallel.layout import Place
from surefoot.parallel.lookout import asked_elsewhere
from surefoot.parallel.ranks import Ranks, any_of
from surefoot.tasks.task import FunctionTask, Task

MicroBatches = Generator[MicroBatch, None, None]


@dataclass(frozen=True)
class Material:
    """What is trained on what."""

    model: nn.Module
    task: Task
    train: Any
    """A `Source`, or a `StreamSource`."""
    validation: Mapping[str, Source] = field(default_factory=dict)
    given: GivenParts = NOTHING_GIVEN
    """Parts of the update that were handed in."""


@dataclass(frozen=True)
class Assembly:
    """The parts of one run."""

    material: Material
    settings: Settings
    place: Place
    trainable: Trainable
    plan: DataPlan
    pace: Pace
    schedule: Schedule
    begun_for: int | None
    """The horizon that the run began with, in updates; None where that is a time."""
    horizon_updates: int | Undecided
    cadences: Cadences
    loader: Loader
    eval_loaders: Mapping[str, Loader]
    evaluator: Evaluator
    decisions: Decisions
    """What follows from an evaluation."""
    agreement: Agreement
    """How the ranks agree to stop."""
    coupling: str = ""
    """What is to be said of a loss that couples the samples of a batch; empty for nothing."""
    compilation: Compilation = BEFORE_THERE_WAS_A_CHOICE
    """What of the model is compiled; `settings` hold the same in the place of `auto`."""

    def open_windows(
        self,
        cursor: Any,
        should_abort: ShouldAbort = never,
        watch: Callable[[MicroBatches], MicroBatches] = identity,
    ) -> Generator[Window, None, None]:
        """The windows of training from `cursor` on; closing the iterator ends the workers.

        Args:
            should_abort: a wait for a worker raises `CutShort` where it says so.
            watch: hands the micro-batches on, and looks at them.
        """
        with closing(watch(self.loader.iterate(cursor, should_abort))) as micro_batches:
            opened = windows(micro_batches)
            if self.place.mesh is None:
                yield from opened
            else:
                assert self.plan.samples_per_epoch is not None
                yield from over_ranks(opened, self.plan.samples_per_epoch, position_of(cursor))

    def make_update(
        self, observers: Sequence[Observer] = (), investigate: Investigation = no_findings
    ) -> Update:
        """The update of this run, which reports to `observers`; see `update_parts.make_update`."""
        return make_update(self.trainable, self.settings, observers, investigate)

    def evaluate_one_batch(self) -> dict[str, float]:
        """The metrics of the first batch of each set, as SET/METRIC; tells nobody."""
        found: dict[str, float] = {}
        for name, loader in self.eval_loaders.items():
            with (
                closing(loader.iterate_once()) as micro_batches,
                uncompiled(self.compilation.extent),
            ):
                first = evaluate(
                    self.material.model,
                    self.evaluator.task,
                    islice(micro_batches, 1),
                    self.trainable.precision,
                    self.trainable.device,
                    self.evaluator.sum_over_ranks,
                    self.evaluator.sum_up,
                )
            found |= {f"{name}/{metric}": value for metric, value in first.metrics.items()}
        return found

    def close(self) -> None:
        """Ends all loader workers."""
        self.loader.close()
        for loader in self.eval_loaders.values():
            loader.close()


def as_in_settings(pace: Pace) -> int | None:
    """A run that begins now began for the horizon of its settings."""
    return None


def assemble(
    material: Material,
    settings: Settings,
    process: Process,
    begun_for: Callable[[Pace], int | None] = as_in_settings,
    begun_with: Compilation | None = None,
) -> Assembly:
    """Builds every part of a run.

    Args:
        material: what is trained on what.
        settings: how.
        process: as `prepare_process` has made it ready, before the model was made.
        begun_for: the horizon that the run began with, in updates, by what an update consumes; None
            for that of the settings.
        begun_with: what was compiled when the run began; None for a run that begins now.

    Raises:
        SurefootError: a part cannot be built as asked.
    """
    device, place, given = process.device, process.place, material.given
    order = make_order(material.train, settings, given.sampler)
    plan = make_plan(material.train, settings, place, order)
    pace = make_pace(material.train, material.task, plan, material.model, settings)
    horizon = updates_in(settings.train.horizon, pace)
    if begun_with is None:
        compilation = choose_compilation(material.model, settings, device, place, pace, horizon)
    else:
        compilation = keep_compilation(settings, begun_with)
    settings = compilation.settle(settings)
    task = place_task(material.task, material.model, settings, place.mesh)
    begun = begun_for(pace)
    schedule = make_schedule(settings, pace, begun, given.schedule)
    if place.mesh is None:
        trainable = make_trainable(material.model, task, settings, schedule, process, given)
        with uncompiled(compilation.extent):
            coupling = check_loss(material, device)
    else:
        # Before the model is spread: the loss of a few samples needs no other rank.
        coupling = check_loss(material, torch.device("cpu"))
        trainable = make_trainable(material.model, task, settings, schedule, process, given)
        seed_rank(settings.seed, place)
    loader_settings = make_loader_settings(settings)
    eval_loaders = {
        name: make_eval_loader(source, material.task, settings, loader_settings, device, place)
        for name, source in material.validation.items()
    }
    return Assembly(
        material=material,
        settings=settings,
        place=place,
        trainable=trainable,
        plan=plan,
        pace=pace,
        schedule=schedule,
        begun_for=begun or (horizon if isinstance(horizon, int) else None),
        horizon_updates=horizon,
        cadences=make_cadences(settings, plan, pace, place.ranks.size),
        loader=Loader(
            material.train,
            plan,
            weight=weight_of(material.task, task),
            settings=loader_settings,
            device=device,
        ),
        eval_loaders=eval_loaders,
        evaluator=make_evaluator(material, task, settings, trainable, eval_loaders, place),
        decisions=Decisions(
            trainable.state.best,
            deciding_metric(settings, material.task),
            trainable.optimizing.plateau,
            trainable.optimizing.stopping,
        ),
        agreement=make_agreement(trainable.passing.ranks.host_sums, place.ranks),
        coupling=coupling,
        compilation=compilation,
    )


def make_evaluator(
    material: Material,
    task: Task,
    settings: Settings,
    trainable: Trainable,
    eval_loaders: Mapping[str, Loader],
    place: Place,
) -> Evaluator:
    """Evaluates the weights that the settings name on every validation set."""
    use_ema = settings.evaluate.weights == "ema"
    return Evaluator(
        model=material.model,
        task=task,
        sets={name: loader.iterate_once for name, loader in eval_loaders.items()},
        precision=trainable.precision,
        device=trainable.device,
        use_weights=lambda: evaluated_weights(material.model, trainable, use_ema),
        weights=settings.evaluate.weights,
        sum_over_ranks=identity if place.mesh is None else place.mesh.sum_over_data,
        sum_up=trainable.passing.ranks.sum_up,
    )


def make_agreement(host_sums: HostSums | None, ranks: Ranks) -> Agreement:
    """How the ranks of a run agree to stop."""
    if host_sums is None:
        return Agreement()
    return Agreement(
        each_update=host_sums.asked_to_stop,
        now=lambda asked: any_of(ranks, "stop", asked),
        each_batch=host_sums.any_of,
        elsewhere=asked_elsewhere,
        alone=False,
    )


@contextmanager
def evaluated_weights(model: nn.Module, trainable: Trainable, use_ema: bool) -> Iterator[None]:
    """Inside, the model holds the weights to evaluate; nothing stays gathered afterwards."""
    average = trainable.optimizing.average if use_ema else NoAverage()
    try:
        with average.swapped(model):
            yield
    finally:
        # Also where the evaluation was left: what is saved then is what is trained.
        trainable.passing.reshard()


def check_loss(material: Material, device: torch.device) -> str:
    """Refuses a plain loss that does not add up over samples; a stream is not read ahead for it.

    Returns:
        What is to be said of samples that the loss couples; empty for nothing.

    Raises:
        ModelError: the loss is a mean, or compares each prediction with every target.
    """
    source = material.train
    if not isinstance(material.task, FunctionTask):
        return ""
    with preserved_rng(device):
        if not (samples := first_samples(source, NUM_SAMPLES)):
            return ""
        few = FewSamples.of(samples, lambda some: collated(source, some, range(len(some))))
    return check_sums(material.model, material.task, few, device)
