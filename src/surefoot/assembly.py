"""From a model, data and a task, with settings, to the parts of one run. Reads no recipe, no file.

Everything that a run is made of is chosen here, once, in the order in which it is used. Nothing is
trained and nothing is written.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import nn

from surefoot.config.building import make_schedule
from surefoot.config.sections import Settings
from surefoot.config.sections.optimizers import OptimizerSection
from surefoot.config.sections.schedules import PlateauSection
from surefoot.core.counting import Pace, updates_in
from surefoot.core.errors import RequestError
from surefoot.core.plateau import Plateau, PlateauState
from surefoot.core.reports import Observer
from surefoot.core.schedules import Undecided
from surefoot.core.stopping import EarlyStopping, StoppingState
from surefoot.core.units import Steps
from surefoot.data.batch import MicroBatch
from surefoot.data.fetch import collated
from surefoot.data.loader import Loader, LoaderSettings
from surefoot.data.order import BatchPlan
from surefoot.data.sources.base import Source
from surefoot.data.sources.stream import StreamPlan, StreamSource, refuse_stream
from surefoot.engine.decisions import Course, Decisions, RuleState, WatchedMetric
from surefoot.engine.evaluate import Evaluator, OpenSet, evaluate
from surefoot.engine.guard import Guard, NonFinitePolicy
from surefoot.engine.passes import PlainPass
from surefoot.engine.reporting import ReportLog
from surefoot.engine.signals import Signals
from surefoot.engine.step import Update, UpdateParts
from surefoot.engine.sum_check import NUM_SAMPLES, refuse_a_mean
from surefoot.engine.window import Window, windows
from surefoot.numerics.clipping import ClipNorm, NoClip, global_norm, weight_norm
from surefoot.numerics.determinism import preserved_rng, seed_everything, use_deterministic
from surefoot.numerics.loss_scaling import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from surefoot.numerics.precision import Precision, apply_matmul_mode, choose_precision
from surefoot.observe.probes import MemoryProbe
from surefoot.optim.ema import NoAverage, WeightEma
from surefoot.optim.ledger import GroupOverride, ParameterLedger
from surefoot.optim.registry import build_optimizer
from surefoot.optim.update import SkipKind, UpdateOptimizer
from surefoot.state.run_state import Best, Progress, RunState
from surefoot.tasks.task import FunctionTask, Task

NEVER_STEPS = 2**62
"""A cadence that no run reaches."""


@dataclass(frozen=True)
class Material:
    """What is trained on what."""

    model: nn.Module
    task: Task
    train: Any
    """A `Source`, or a `StreamSource`."""
    validation: Mapping[str, Source] = field(default_factory=dict)


@dataclass(frozen=True)
class Trainable:
    """A model with everything that one update of it needs, apart from data."""

    device: torch.device
    precision: Precision
    ledger: ParameterLedger
    optimizer: UpdateOptimizer
    course: Course
    stopping: RuleState
    average: WeightEma | NoAverage
    state: RunState
    log: ReportLog
    update: Update


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

    def open_windows(self, cursor: Any) -> Iterator[Window]:
        """The windows of training from `cursor` on; closing the iterator ends the workers."""
        with closing(self.loader.iterate(cursor)) as micro_batches:
            yield from windows(micro_batches)

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
                    self.material.task,
                    islice(micro_batches, 1),
                    trainable.precision,
                    trainable.device,
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
    """Sets the determinism switch and picks the device; draws and seeds nothing.

    Raises:
        RequestError: the device is not there.
    """
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
    plan = make_plan(material.train, settings)
    pace = make_pace(material, plan)
    horizon_updates = updates_in(settings.train.horizon, pace)
    device = choose_device(settings.device)
    trainable = make_trainable(material.model, material.task, settings, device, pace, observers)
    check_loss(material, device)
    loader_settings = make_loader_settings(settings)
    loader = Loader(
        material.train, plan, weight=material.task.weight, settings=loader_settings, device=device
    )
    eval_loaders = {
        name: make_eval_loader(source, material.task, settings, loader_settings, device)
        for name, source in material.validation.items()
    }
    use_ema = settings.evaluate.weights == "ema"
    evaluator = Evaluator(
        model=material.model,
        task=material.task,
        sets={name: _opened_by(loader) for name, loader in eval_loaders.items()},
        precision=trainable.precision,
        device=device,
        use_weights=lambda: (trainable.average if use_ema else NoAverage()).swapped(material.model),
        weights=settings.evaluate.weights,
    )
    best = trainable.state.best
    assert isinstance(best, Best)
    decisions = Decisions(
        best,
        WatchedMetric(*material.task.deciding_metric),
        trainable.course.plateau,
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
    )


def check_loss(material: Material, device: torch.device) -> None:
    """Refuses a plain loss that returns a mean; a stream is not read ahead for it.

    Raises:
        ModelError: the loss is a mean.
    """
    source = material.train
    if isinstance(material.task, FunctionTask) and not isinstance(source, StreamSource):
        with preserved_rng(device):
            few = [source[index] for index in range(min(NUM_SAMPLES, len(source)))]
            batch = collated(source, few, range(len(few)))
        refuse_a_mean(material.model, material.task, batch, device)


def make_trainable(
    model: nn.Module,
    task: Task,
    settings: Settings,
    device: torch.device,
    pace: Pace,
    observers: Sequence[Observer],
) -> Trainable:
    """Puts the model on the device and builds all that one update of it needs."""
    precision = choose_precision(settings.precision.dtype, device)
    apply_matmul_mode(precision)
    model.to(device)
    compile_model(model, settings.train.compile)
    ledger = make_ledger(model, settings.optimizer)
    skipping = precision.needs_loss_scale or settings.guard.non_finite == "skip"
    optimizer = build_optimizer(settings.optimizer, ledger, device, skipping)
    loss_scale = make_loss_scale(settings, precision, device)
    average = WeightEma(model, settings.ema.decay) if settings.ema.kind == "on" else NoAverage()
    course = Course(make_schedule(settings, pace), _plateau_state(settings))
    stopping = _stopping_state(settings)
    guard = Guard(
        policy=NonFinitePolicy(settings.guard.non_finite),
        skip_budget=settings.guard.skip_budget,
        dynamic_loss_scale=isinstance(loss_scale, DynamicLossScale),
        optimizer_skips=optimizer.skips is not SkipKind.NEVER,
    )
    clip_norm = settings.train.clip_norm
    log = ReportLog(
        Progress(),
        guard,
        observers,
        clip_norm=float("inf") if clip_norm == "off" else float(clip_norm),
        counts_tokens=task.unit == "tokens",
        memory_bytes=MemoryProbe(device),
    )
    every = settings.log.weight_norm_every
    update = Update(
        UpdateParts(
            parameters=ledger.parameters,
            sum_over_ranks=lambda weights: weights,
            run_pass=PlainPass(model, task, precision),
            loss_scale=loss_scale,
            global_norm=global_norm,
            clip=NoClip() if clip_norm == "off" else ClipNorm(float(clip_norm)),
            course=course,
            optimizer=optimizer,
            average=average,
            signals=Signals(
                lambda: weight_norm(ledger.parameters),
                every.value if isinstance(every, Steps) else NEVER_STEPS,
            ),
            log=log,
        )
    )
    state = RunState(
        progress=log.progress,
        model=model,
        optimizer=optimizer,
        loss_scale=loss_scale,
        average=average,
        guard=guard,
        plateau=course.plateau,
        stopping=stopping,
        best=Best(),
        device=device,
    )
    return Trainable(
        device, precision, ledger, optimizer, course, stopping, average, state, log, update
    )


def compile_model(model: nn.Module, extent: Literal["off", "blocks", "whole"]) -> None:
    """Compiles in place, so that parameter names carry no wrapper prefix.

    Raises:
        RequestError: `blocks` is asked of a model that has none.
    """
    if extent == "whole":
        model.compile()
    elif extent == "blocks":
        blocks = getattr(model, "blocks", None)
        if not isinstance(blocks, nn.ModuleList):
            raise RequestError(
                f"{type(model).__name__} has no `blocks`",
                where="train.compile",
                rule="`blocks` compiles each module of the model's `blocks` (an nn.ModuleList)",
                remedy="use train.compile=whole, or name the list of layers `blocks`",
            )
        for block in blocks:
            block.compile()


def make_ledger(model: nn.Module, section: OptimizerSection) -> ParameterLedger:
    """The parameter groups that an optimizer section asks for."""
    overrides = [
        GroupOverride(group.pattern, group.lr_multiplier, _decay_or_rule(group.weight_decay))
        for group in section.groups
    ]
    return ParameterLedger.build(
        model,
        weight_decay=section.weight_decay,
        rule=section.decay_rule,
        decay_embeddings=section.decay_embeddings,
        overrides=overrides,
    )


def _decay_or_rule(decay: float | str) -> float | Literal["as-optimizer"]:
    return "as-optimizer" if isinstance(decay, str) else decay


def make_loss_scale(settings: Settings, precision: Precision, device: torch.device) -> LossScale:
    """None where the precision needs none."""
    if not precision.needs_loss_scale:
        return NoLossScale()
    value = settings.precision.loss_scale
    return (
        DynamicLossScale(device=device)
        if value == "dynamic"
        else StaticLossScale(float(value), device)
    )


def make_plan(source: Source | StreamSource, settings: Settings) -> BatchPlan | StreamPlan:
    """How each epoch of the training set is cut into windows.

    Raises:
        RequestError: short windows of a stream shall be dropped.
    """
    train = settings.train
    if isinstance(source, StreamSource):
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
        drop_short=train.short_batch == "drop",
    )


def make_pace(material: Material, plan: BatchPlan | StreamPlan) -> Pace:
    """What one update consumes. Tokens a sample are those of the first sample's batch."""
    window = plan.micro_batch * plan.window_length
    if isinstance(plan, StreamPlan):
        return Pace(samples_per_update=window)
    tokens = None
    if material.task.unit == "tokens":
        source = material.train
        weight = material.task.weight(collated(source, [source[0]], [0]))
        tokens = weight if isinstance(weight, float) else sum(weight.values())
    return Pace(
        samples_per_update=plan.samples_per_window,
        num_samples=plan.num_samples,
        drop_short=plan.drop_short,
        tokens_per_sample=tokens,
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
) -> Loader:
    """A loader that reads a validation set once, in its own order."""
    refuse_stream(source)
    size = settings.evaluate.micro_batch
    micro_batch = settings.train.micro_batch if size == "as-in-training" else int(size)
    plan = BatchPlan(len(source), micro_batch, seed=settings.seed, shuffle=False)
    return Loader(source, plan, weight=task.weight, settings=loader_settings, device=device)


def _opened_by(loader: Loader) -> OpenSet:
    def open_set() -> Generator[MicroBatch, None, None]:
        return loader.iterate_once()

    return open_set


def _plateau_state(settings: Settings) -> RuleState:
    section = settings.schedule
    if not isinstance(section, PlateauSection):
        return RuleState(None, None, 1.0, PlateauState.from_json)
    rule = Plateau(
        direction=section.direction,
        factor=section.factor,
        patience=section.patience,
        min_delta=section.min_delta,
        cooldown=section.cooldown,
        floor=section.floor,
    )
    watched = WatchedMetric(section.metric, section.direction)
    return RuleState(rule, watched, 1.0, PlateauState.from_json)


def _stopping_state(settings: Settings) -> RuleState:
    section = settings.early_stopping
    if section.kind == "off":
        return RuleState(None, None, False, StoppingState.from_json)
    rule = EarlyStopping(section.direction, section.patience, section.min_delta)
    watched = WatchedMetric(section.metric, section.direction)
    return RuleState(rule, watched, False, StoppingState.from_json)
