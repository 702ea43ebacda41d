"""From a model, a task and settings to all that one update needs, apart from data.

Every part is chosen here, once, in the order in which it is used. Nothing is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from surefoot.config.building import make_schedule
from surefoot.config.sections import Settings
from surefoot.config.sections.optimizers import OptimizerSection
from surefoot.config.sections.schedules import PlateauSection
from surefoot.core.counting import Pace
from surefoot.core.plateau import Plateau, PlateauState
from surefoot.core.reports import Event, Observer
from surefoot.core.stopping import EarlyStopping, StoppingState
from surefoot.core.units import Steps
from surefoot.data.batch import MicroBatch
from surefoot.engine.decisions import RuleState, WatchedMetric
from surefoot.engine.evaluate import SumUp
from surefoot.engine.first_bad import FirstBad
from surefoot.engine.guard import Guard, NonFinitePolicy
from surefoot.engine.idle_parameters import IdleParameters
from surefoot.engine.measure.device_clock import DeviceClock, TimedTask
from surefoot.engine.measure.forward_clock import ForwardClock
from surefoot.engine.measure.sampling import SampledPass, Sampling
from surefoot.engine.measure.signals import MeasuredSignals
from surefoot.engine.passes import Pass, PlainPass, RankReduction
from surefoot.engine.pipeline_pass import PipelinePass, PipelineSums
from surefoot.engine.reporting import ReportLog
from surefoot.engine.routing import CountedPass, Followers, RouterLoads, loads_of
from surefoot.engine.spike_guard import SpikeGuard, SpikePolicy, SpikeSettings
from surefoot.engine.step import Update, UpdateParts
from surefoot.memory.weights_on_host import WeightsOnHost, check_weights_on_host
from surefoot.numerics.clipping import ClipNorm, NoClip, global_norm, gradients_of, weight_norm
from surefoot.numerics.loss_scaling import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from surefoot.numerics.measures import UnitWatch
from surefoot.numerics.modes import ModeWatch
from surefoot.numerics.precision import Precision, apply_matmul_mode, choose_precision
from surefoot.observe.probes import MemoryProbe
from surefoot.optim.ema import NoAverage, WeightEma
from surefoot.optim.ledger import GroupOverride, ParameterLedger
from surefoot.optim.registry import build_optimizer
from surefoot.optim.state_on_host import check_state_on_host
from surefoot.optim.update import Course, SkipKind, UpdateOptimizer
from surefoot.parallel.collectives import HostSums, SharedBuffers
from surefoot.parallel.layout import ALONE, LaidOut, Place, Wishes, lay_out
from surefoot.parallel.parts import ShardedNorm, local_gradients
from surefoot.state.run_state import Best, Progress, RunState
from surefoot.state.stages import ALL_LAYERS, Layers
from surefoot.tasks.task import Task

NEVER_STEPS = 2**62
"""A cadence that no run reaches."""


@dataclass(frozen=True)
class Trainable:
    """A model with everything that one update of it needs, apart from data."""

    device: torch.device
    precision: Precision
    ledger: ParameterLedger
    optimizer: UpdateOptimizer
    course: Course
    plateau: RuleState
    stopping: RuleState
    average: WeightEma | NoAverage
    state: RunState
    log: ReportLog
    update: Update
    first_bad: FirstBad
    """Finds the module that made an update go wrong."""
    host_sums: HostSums | None = None
    """Where the ranks meet in each update; None for one rank."""
    device_milliseconds: Callable[[], dict[str, float] | None] = lambda: None
    """Where the time of a sampled update goes on the device; None without events of its own."""
    reshard_all: Callable[[], None] = lambda: None
    """Gives up sharded parameters that an evaluation has gathered."""
    sum_up: SumUp | None = None
    """How an evaluation runs where the layers lie on several ranks."""
    forward_seconds: Callable[[], float] = lambda: 0.0
    """Host time of all forwards so far, where a forward waits for no other rank."""


def make_trainable(
    model: nn.Module,
    task: Task,
    settings: Settings,
    device: torch.device,
    pace: Pace,
    observers: Sequence[Observer],
    place: Place = ALONE,
) -> Trainable:
    """Lays the model out on the device and builds all that one update of it needs."""
    precision = choose_precision(settings.precision.dtype, device)
    apply_matmul_mode(precision)
    laid_out = lay_out(model, device, wishes_of(settings, precision), place)
    layers = layers_of(laid_out, place)
    ledger = make_ledger(model, settings.optimizer, layers.elsewhere)
    skipping = may_skip(settings, precision)
    optimizer = make_optimizer(settings, ledger, device, skipping, laid_out.is_sharded)
    loss_scale = make_loss_scale(settings, precision, device)
    average = WeightEma(model, settings.ema.decay) if settings.ema.kind == "on" else NoAverage()
    plateau = _plateau_state(settings)
    course = Course(make_schedule(settings, pace), plateau)
    stopping = _stopping_state(settings)
    guard = make_guard(settings, loss_scale, optimizer)
    log = make_log(settings, guard, task, device, observers)
    # Forwards and backwards of stages take turns: no event tells them apart.
    clock = DeviceClock(device) if device.type == "cuda" and laid_out.pipeline is None else None
    timed = task if clock is None else TimedTask(task, clock)
    joint = joint_parts(laid_out, model, timed, precision, place, ledger.parameters)
    run_pass = spared_pass(joint.run_pass, settings, model, device, place)
    loads = loads_of(task)
    sampling = make_sampling(settings, model, laid_out, log, optimizer, clock, loads)
    update = Update(
        UpdateParts(
            parameters=ledger.parameters,
            sum_over_ranks=joint.sum_over_ranks,
            run_pass=watched_pass(run_pass, loads, sampling),
            loss_scale=loss_scale,
            gradients_of=naming_idle(joint, ledger, log, place),
            global_norm=joint.global_norm,
            clip=make_clip(settings.train.clip_norm),
            course=course,
            optimizer=optimizer,
            average=average if loads is None else Followers(average, loads),
            signals=make_signals(settings, joint.weight_norm, sampling),
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
        plateau=plateau,
        stopping=stopping,
        best=Best(),
        device=device,
        rank=place.ranks.rank,
        layers=layers,
    )
    return Trainable(
        device,
        precision,
        ledger,
        optimizer,
        course,
        plateau,
        stopping,
        average,
        state,
        log,
        update,
        FirstBad(model, run_pass, loss_scale, device, place.ranks),
        joint.host_sums,
        clock.milliseconds if clock is not None else lambda: None,
        laid_out.reshard_all,
        joint.sum_up,
        joint.forward_seconds,
    )


def may_skip(settings: Settings, precision: Precision) -> bool:
    """Whether the run goes on after an update that is not applied."""
    answers = {settings.guard.non_finite, settings.guard.spikes}
    return precision.needs_loss_scale or "skip" in answers


def wishes_of(settings: Settings, precision: Precision) -> Wishes:
    """What the settings ask of the laying out."""
    train = settings.train
    return Wishes(
        settings.parallel,
        train.compile,
        precision.compute_dtype,
        settings.memory,
        train.accumulation,
    )


def make_clip(clip_norm: float | str) -> ClipNorm | NoClip:
    """What is done to gradients whose norm is above `clip_norm`; nothing where it is `off`."""
    return NoClip() if clip_norm == "off" else ClipNorm(float(clip_norm))


def make_signals(
    settings: Settings, weight_norm: Callable[[], Tensor], sampling: Sampling | None
) -> MeasuredSignals:
    """What is sent to the host of each update."""
    every = settings.log.weight_norm_every
    steps = every.value if isinstance(every, Steps) else NEVER_STEPS
    return MeasuredSignals(weight_norm, steps, sampling)


def make_sampling(
    settings: Settings,
    model: nn.Module,
    laid_out: LaidOut,
    log: ReportLog,
    optimizer: UpdateOptimizer,
    clock: DeviceClock | None,
    loads: RouterLoads | None,
) -> Sampling | None:
    """What is measured now and then, or None where nothing is.

    Weights that lie in shards or stages are not measured one by one, units only where all layers
    lie on this rank, and hooks are not seen in compiled code.
    """
    every = settings.log.details_every
    if not isinstance(every, Steps):
        return None
    is_staged = laid_out.pipeline is not None
    whole = {} if laid_out.is_sharded or is_staged else dict(model.named_parameters())
    sampling = Sampling(
        every.value,
        log.next_window,
        {name: parameter for name, parameter in whole.items() if parameter.requires_grad},
        settings.log.layers,
        optimizer.optimizer,
        ModeWatch(model),
        UnitWatch(model) if settings.train.compile == "off" and not is_staged else None,
        clock,
    )
    if loads is not None:
        sampling.loads = loads.measures
    return sampling


def spared_pass(
    run_pass: Pass, settings: Settings, model: nn.Module, device: torch.device, place: Place
) -> Pass:
    """The pass, with weights on the host while others compute where the recipe wants it."""
    if settings.memory.offload_parameters == "off":
        return run_pass
    check_weights_on_host(device, place.has_whole_model)
    weights = WeightsOnHost(model, device)

    def spared(
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        with weights.away():
            return run_pass(micro_batches, denominators, loss_scale)

    return spared


def watched_pass(run_pass: Pass, loads: RouterLoads | None, sampling: Sampling | None) -> Pass:
    """The pass with all that looks on while it runs."""
    if loads is not None:
        run_pass = CountedPass(run_pass, loads)
    return run_pass if sampling is None else SampledPass(run_pass, sampling)


def make_log(
    settings: Settings,
    guard: Guard,
    task: Task,
    device: torch.device,
    observers: Sequence[Observer],
) -> ReportLog:
    """The log of updates, at the beginning of a run."""
    clip_norm = settings.train.clip_norm
    return ReportLog(
        Progress(),
        guard,
        observers,
        clip_norm=float("inf") if clip_norm == "off" else float(clip_norm),
        counts_tokens=task.unit == "tokens",
        memory_bytes=MemoryProbe(device),
    )


def make_guard(settings: Settings, loss_scale: LossScale, optimizer: UpdateOptimizer) -> Guard:
    """The guard that the settings ask for."""
    return Guard(
        policy=NonFinitePolicy(settings.guard.non_finite),
        skip_budget=settings.guard.skip_budget,
        dynamic_loss_scale=isinstance(loss_scale, DynamicLossScale),
        optimizer_skips=optimizer.skips is not SkipKind.NEVER,
        spikes=SpikeGuard(
            SpikeSettings(
                policy=SpikePolicy(settings.guard.spikes),
                budget=settings.guard.spike_budget,
                num_rolled_back=settings.guard.roll_back_updates,
                num_left_out=settings.guard.leave_out_windows,
            )
        ),
    )


@dataclass(frozen=True)
class JointParts:
    """The parts of an update that differ between one rank and several."""

    run_pass: Pass
    weight_norm: Callable[[], Tensor]
    sum_over_ranks: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda weights: weights
    gradients_of: Callable[[Sequence[Tensor]], list[Tensor]] = gradients_of
    global_norm: Callable[[Sequence[Tensor]], Tensor] = global_norm
    host_sums: HostSums | None = None
    sum_up: SumUp | None = None
    forward_seconds: Callable[[], float] = lambda: 0.0


def joint_parts(
    laid_out: LaidOut,
    model: nn.Module,
    task: Task,
    precision: Precision,
    place: Place,
    parameters: Sequence[Tensor],
) -> JointParts:
    """On one rank nothing is summed, and nothing is asked of anybody."""
    mesh = place.mesh
    if mesh is None:
        return JointParts(PlainPass(model, task, precision), lambda: weight_norm(parameters))
    share, host_sums = SharedBuffers(model, mesh).share, HostSums(mesh)
    forward = laid_out.forward
    reduction = RankReduction(forward, laid_out.sync, share, mesh.sum_over_items)
    if laid_out.pipeline is None and not laid_out.is_sharded:
        clocked = ForwardClock(task)
        return JointParts(
            PlainPass(forward, clocked, precision, reduction),
            lambda: weight_norm(parameters),
            host_sums,
            host_sums=host_sums,
            forward_seconds=lambda: clocked.seconds,
        )
    run_pass: Pass = PlainPass(forward, task, precision, reduction)
    sum_up = None
    if laid_out.pipeline is not None:
        run_pass = PipelinePass(laid_out.pipeline, task, precision, share, mesh.sum_over_items)
        sum_up = PipelineSums(laid_out.pipeline, task, precision)
    norm = ShardedNorm(parameters, mesh)
    return JointParts(
        run_pass, norm.of_values, host_sums, local_gradients, norm.of_gradients, host_sums, sum_up
    )


def naming_idle(
    joint: JointParts, ledger: ParameterLedger, log: ReportLog, place: Place
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """The gradients; on one rank parameters without any are named once. Several refuse them."""
    if place.mesh is not None:
        return joint.gradients_of

    def tell(text: str) -> None:
        log.tell(Event("note", log.progress.step, text, {}, time.time()))

    return IdleParameters([row.name for row in ledger.rows], tell)


def layers_of(laid_out: LaidOut, place: Place) -> Layers:
    """Which layers this rank has, and whether it speaks for those that have the same."""
    if laid_out.pipeline is None or place.mesh is None:
        return ALL_LAYERS
    where = place.sizes.coordinates(place.mesh.rank)
    tells = {axis for axis, index in where.items() if index > 0} == {"pipeline"}
    stage_plan = laid_out.pipeline.stage_plan
    return Layers(stage_plan.elsewhere, stage_plan.size_elsewhere, tells)


def make_optimizer(
    settings: Settings,
    ledger: ParameterLedger,
    device: torch.device,
    skipping: bool,
    is_sharded: bool,
) -> UpdateOptimizer:
    """The optimizer that a recipe asks for, its state where the recipe wants it."""
    section = settings.optimizer
    optimizer = build_optimizer(section, ledger, device, skipping, section.low_precision_weights)
    if settings.memory.offload_optimizer == "cpu":
        check_state_on_host(device, is_sharded)
        optimizer.keep_state_on_host()
    return optimizer


def make_ledger(
    model: nn.Module, section: OptimizerSection, elsewhere: Collection[str] = ()
) -> ParameterLedger:
    """The parameter groups that an optimizer section asks for.

    Args:
        elsewhere: names of parameters that lie on other ranks.
    """
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
        elsewhere=elsewhere,
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
