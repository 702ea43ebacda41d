"""From a model, data and a task, with settings, to the parts of one run. Reads no recipe, no file.

Everything that a run is made of is chosen here, once, in the order in which it is used. Nothing is
trained and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import nn

from surefoot.assembly.deciding import deciding_metric
from surefoot.assembly.loading import (
    make_eval_loader,
    make_loader_settings,
    make_order,
    make_pace,
    make_plan,
    opened_by,
)
from surefoot.assembly.task_layout import place_task
from surefoot.assembly.update_parts import Trainable, make_trainable
from surefoot.config.sections import Settings
from surefoot.core.counting import Pace, updates_in
from surefoot.core.errors import RequestError
from surefoot.core.reports import Observer
from surefoot.core.schedules import Undecided
from surefoot.data.fetch import collated
from surefoot.data.loader import Loader, position_of
from surefoot.data.order import BatchPlan, keyed_hash
from surefoot.data.sources.base import Source
from surefoot.data.sources.stream import StreamPlan, StreamSource
from surefoot.engine.decisions import Decisions
from surefoot.engine.evaluate import Evaluator, as_it_is, evaluate
from surefoot.engine.routing import weight_of
from surefoot.engine.sum_check import NUM_SAMPLES, FewSamples, check_sums
from surefoot.engine.window import Window, over_ranks, windows
from surefoot.numerics.determinism import preserved_rng, seed_everything, use_deterministic
from surefoot.optim.ema import NoAverage
from surefoot.parallel.digests import digest_of_weights
from surefoot.parallel.join import join_ranks
from surefoot.parallel.layout import ALONE, Place, find_place
from surefoot.state.run_state import Best
from surefoot.tasks.task import FunctionTask, Task

RANK_SEED = 3
"""Sets the seeds of ranks apart from other uses of the run's seed."""


@dataclass(frozen=True)
class Material:
    """What is trained on what."""

    model: nn.Module
    task: Task
    train: Any
    """A `Source`, or a `StreamSource`."""
    validation: Mapping[str, Source] = field(default_factory=dict)


@dataclass(frozen=True)
class Assembly:
    """The parts of one run."""

    material: Material
    settings: Settings
    trainable: Trainable
    plan: BatchPlan | StreamPlan
    pace: Pace
    horizon_updates: int | Undecided
    loader: Loader
    evaluator: Evaluator
    decisions: Decisions
    eval_loaders: Mapping[str, Loader]
    place: Place = ALONE
    initial_digest: str = ""
    """Of the weights that several ranks begin with; empty for one."""
    coupling: str = ""
    """What is to be said of a loss that couples the samples of a batch; empty for nothing."""

    def open_windows(self, cursor: Any) -> Iterator[Window]:
        """The windows of training from `cursor` on; closing the iterator ends the workers."""
        with closing(self.loader.iterate(cursor)) as micro_batches:
            opened = windows(micro_batches)
            if self.place.mesh is None:
                yield from opened
            else:
                assert isinstance(self.plan, BatchPlan)
                yield from over_ranks(opened, self.plan.samples_per_epoch, position_of(cursor))

    def evaluate(self) -> str | None:
        """Evaluates every set, tells the observers, decides; returns a reason to finish."""
        if not self.eval_loaders:
            return None
        log, step = self.trainable.log, self.trainable.state.progress.step
        reports = self.evaluator.run(step)
        for report in reports:
            for observer in log.observers:
                observer.on_eval(report)
        return self.decisions(step, reports)

    def evaluate_one_batch(self) -> dict[str, float]:
        """The metrics of the first batch of each set, as SET/METRIC; tells nobody."""
        found: dict[str, float] = {}
        for name, loader in self.eval_loaders.items():
            trainable = self.trainable
            with closing(loader.iterate_once()) as micro_batches:
                first = evaluate(
                    self.material.model,
                    self.evaluator.task,
                    islice(micro_batches, 1),
                    trainable.precision,
                    trainable.device,
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


def prepare_process(settings: Settings) -> torch.device:
    """Seeds every generator, sets the determinism switch, and picks the device.

    Call it before the model is built, so that its weights are those of the seed.

    Raises:
        RequestError: the device is not there.
    """
    seed_everything(settings.seed)
    return prepare_device(settings)


def prepare_device(settings: Settings) -> torch.device:
    """Joins the ranks of a launch, sets the determinism switch and picks the device.

    It draws and seeds nothing.

    Raises:
        RequestError: the device is not there.
        RankError: the other ranks are not there.
    """
    join_ranks()
    use_deterministic(settings.deterministic)
    return choose_device(settings.device)


def choose_device(name: Literal["auto", "cpu", "cuda", "mps"]) -> torch.device:
    """The device of that name; `auto` takes CUDA, then MPS, then the CPU.

    Raises:
        RequestError: the device is not there.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    chosen = next(kind for kind, there in available.items() if there) if name == "auto" else name
    if not available[chosen]:
        raise RequestError(
            f"there is no {chosen} device",
            where="device",
            rule=f"available: {', '.join(kind for kind, there in available.items() if there)}",
            remedy="use device=auto",
        )
    return (
        torch.device(chosen, torch.cuda.current_device())
        if chosen == "cuda"
        else torch.device(chosen)
    )


def assemble(
    material: Material, settings: Settings, observers: Sequence[Observer] = ()
) -> Assembly:
    """Builds every part of a run; the process must have been prepared.

    Raises:
        SurefootError: a part cannot be built as asked.
    """
    device = choose_device(settings.device)
    place = find_place(settings.parallel, device)
    task = place_task(material.task, material.model, settings, place.mesh)
    plan = make_plan(material.train, settings, place, make_order(material.train, settings))
    pace = make_pace(material.train, material.task, plan, material.model, settings)
    horizon_updates = updates_in(settings.train.horizon, pace)
    initial_digest = ""
    if place.mesh is None:
        trainable = make_trainable(material.model, task, settings, device, pace, observers)
        coupling = check_loss(material, device)
    else:
        # Before the model is spread: the loss of a few samples needs no other rank.
        coupling = check_loss(material, torch.device("cpu"))
        initial_digest = digest_of_weights(material.model)
        trainable = make_trainable(material.model, task, settings, device, pace, observers, place)
        seed_rank(settings.seed, place)
    loader_settings = make_loader_settings(settings)
    loader = Loader(
        material.train,
        plan,
        weight=weight_of(material.task, task),
        settings=loader_settings,
        device=device,
    )
    eval_loaders = {
        name: make_eval_loader(source, material.task, settings, loader_settings, device, place)
        for name, source in material.validation.items()
    }
    use_ema = settings.evaluate.weights == "ema"
    evaluator = Evaluator(
        model=material.model,
        task=task,
        sets={name: opened_by(loader) for name, loader in eval_loaders.items()},
        precision=trainable.precision,
        device=device,
        use_weights=lambda: evaluated_weights(material.model, trainable, use_ema),
        weights=settings.evaluate.weights,
        sum_over_ranks=as_it_is if place.mesh is None else place.mesh.sum_over_data,
        sum_up=trainable.sum_up,
    )
    best = trainable.state.best
    assert isinstance(best, Best)
    decisions = Decisions(
        best,
        deciding_metric(settings, material.task),
        trainable.plateau,
        trainable.stopping,
        trainable.log.tell,
    )
    return Assembly(
        material,
        settings,
        trainable,
        plan,
        pace,
        horizon_updates,
        loader,
        evaluator,
        decisions,
        eval_loaders,
        place,
        initial_digest,
        coupling,
    )


@contextmanager
def evaluated_weights(model: nn.Module, trainable: Trainable, use_ema: bool) -> Iterator[None]:
    """Inside, the model holds the weights to evaluate; nothing stays gathered afterwards."""
    average = trainable.average if use_ema else NoAverage()
    try:
        with average.swapped(model):
            yield
    finally:
        # Also where the evaluation was left: what is saved then is what is trained.
        trainable.reshard_all()


def seed_rank(seed: int, place: Place) -> None:
    """Gives ranks that see other items, or hold other layers, dropout of their own.

    Others share it, and rank 0 keeps its own.
    """
    if place.random_rank > 0:
        seed_everything(keyed_hash(seed, RANK_SEED, place.random_rank) >> 32)


def check_loss(material: Material, device: torch.device) -> str:
    """Refuses a plain loss that does not add up over samples; a stream is not read ahead for it.

    Returns:
        What is to be said of samples that the loss couples; empty for nothing.

    Raises:
        ModelError: the loss is a mean, or compares each prediction with every target.
    """
    source = material.train
    if not isinstance(material.task, FunctionTask) or isinstance(source, StreamSource):
        return ""
    with preserved_rng(device):
        samples = [source[index] for index in range(min(NUM_SAMPLES, len(source)))]
        few = FewSamples.of(samples, lambda some: collated(source, some, range(len(some))))
    return check_sums(material.model, material.task, few, device)
