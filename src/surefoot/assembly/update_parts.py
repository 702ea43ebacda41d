"""From a model, a task and settings to all that one update needs, apart from data.

Two steps, each done once: `make_trainable` does all that can be refused; `make_update` adds who
hears of the updates. Nothing is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from surefoot.assembly.given_parts import NOTHING_GIVEN, GivenParts
from surefoot.assembly.optimizer_side import OptimizerSide, make_optimizer_side
from surefoot.assembly.pass_side import PassSide, make_pass_side
from surefoot.assembly.process import Process
from surefoot.config.sections import Settings
from surefoot.core.reports import Event, Observer
from surefoot.core.schedules import Schedule
from surefoot.core.units import Steps
from surefoot.engine.after_update import InTurn
from surefoot.engine.first_bad import FirstBad
from surefoot.engine.measure.idle_parameters import IdleParameters
from surefoot.engine.measure.sampling import SampledPass, Sampling
from surefoot.engine.measure.signals import MeasuredSignals
from surefoot.engine.passes import EnclosedPass
from surefoot.engine.reporting import Investigation, ReportLog, no_findings
from surefoot.engine.step import Update, UpdateParts
from surefoot.numerics.measures import UnitWatch
from surefoot.numerics.modes import ModeWatch
from surefoot.numerics.precision import Precision, apply_matmul_mode, choose_precision
from surefoot.observe.events import EventKind
from surefoot.observe.probes import MemoryProbe
from surefoot.parallel.layout import LaidOut, LayoutRequest, Place, lay_out
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
    optimizing: OptimizerSide
    passing: PassSide
    state: RunState
    first_bad: FirstBad
    """Finds the module that made an update go wrong."""
    counts_tokens: bool
    """Whether a weight is a number of tokens."""
    memory_bytes: Callable[[], int]
    """In use on the device."""


def make_trainable(
    model: nn.Module,
    task: Task,
    settings: Settings,
    schedule: Schedule,
    process: Process,
    given: GivenParts = NOTHING_GIVEN,
) -> Trainable:
    """Lays the model out on the device and builds both sides of its updates, and their state.

    Args:
        schedule: of the learning rate, in updates.
        given: the optimizer and the clip, where they were handed in.
    """
    device, place = process.device, process.place
    precision = choose_precision(settings.precision.dtype, device)
    apply_matmul_mode(precision)
    laid_out = lay_out(model, device, make_layout_request(settings, precision), place)
    layers = layers_of(laid_out, place)
    optimizing = make_optimizer_side(
        model,
        task,
        settings,
        schedule,
        precision,
        device,
        given,
        is_sharded=laid_out.is_sharded,
        elsewhere=layers.elsewhere,
    )
    parameters = optimizing.ledger.parameters
    passing = make_pass_side(model, task, settings, precision, device, laid_out, place, parameters)
    return Trainable(
        device=device,
        precision=precision,
        optimizing=optimizing,
        passing=passing,
        state=make_state(model, optimizing, process, layers),
        first_bad=FirstBad(model, passing.run_pass, optimizing.loss_scale, device, place.ranks),
        counts_tokens=task.unit == "tokens",
        memory_bytes=MemoryProbe(device),
    )


def make_layout_request(settings: Settings, precision: Precision) -> LayoutRequest:
    """What the settings ask of the layout."""
    train = settings.train
    return LayoutRequest(
        settings.parallel,
        "off" if train.compile == "auto" else train.compile,
        precision.compute_dtype,
        settings.memory,
        train.accumulation,
        train.channels_last == "on",
    )


def layers_of(laid_out: LaidOut, place: Place) -> Layers:
    """Which layers this rank has, and whether it writes for those that have the same."""
    if laid_out.pipeline is None or place.mesh is None:
        return ALL_LAYERS
    where = place.sizes.coordinates(place.mesh.rank)
    tells = {axis for axis, index in where.items() if index > 0} == {"pipeline"}
    stage_plan = laid_out.pipeline.stage_plan
    return Layers(stage_plan.elsewhere, stage_plan.size_elsewhere, tells)


def make_state(
    model: nn.Module, optimizing: OptimizerSide, process: Process, layers: Layers
) -> RunState:
    """The state side: all that a checkpoint holds, at the beginning of a run."""
    return RunState(
        progress=Progress(),
        model=model,
        optimizer=optimizing.optimizer,
        loss_scale=optimizing.loss_scale,
        average=optimizing.average,
        guard=optimizing.guard,
        plateau=optimizing.plateau,
        stopping=optimizing.stopping,
        best=Best(),
        device=process.device,
        rank=process.place.ranks.rank,
        layers=layers,
    )


def make_update(
    trainable: Trainable,
    settings: Settings,
    observers: Sequence[Observer] = (),
    investigate: Investigation = no_findings,
) -> Update:
    """The update of a model, which reports to `observers`.

    Args:
        investigate: looks into an update that went wrong, before anything else is done.
    """
    optimizing, passing = trainable.optimizing, trainable.passing
    log = ReportLog(
        trainable.state.progress,
        optimizing.guard,
        observers,
        clip_norm=optimizing.clip_norm,
        counts_tokens=trainable.counts_tokens,
        memory_bytes=trainable.memory_bytes,
        investigate=investigate,
    )

    def note(text: str) -> None:
        log.tell(Event(EventKind.NOTE, log.progress.step, text, {}, time.time()))

    sampling = make_sampling(trainable, settings, log.next_window)
    run_pass, average, loads = passing.run_pass, optimizing.average, passing.loads
    # What is run again to look for a fault is neither counted nor sampled.
    if loads is not None:
        run_pass = EnclosedPass(run_pass, loads.counting)
    every = settings.log.weight_norm_every
    weight_norm_every = every.value if isinstance(every, Steps) else NEVER_STEPS
    return Update(
        UpdateParts(
            parameters=optimizing.ledger.parameters,
            sum_over_ranks=passing.ranks.sum_over_ranks,
            run_pass=run_pass if sampling is None else SampledPass(run_pass, sampling),
            loss_scale=optimizing.loss_scale,
            # On one rank parameters without a gradient are named; several ranks refuse them.
            gradients_of=IdleParameters([row.name for row in optimizing.ledger.rows], note)
            if passing.ranks.host_sums is None
            else passing.ranks.gradients_of,
            global_norm=passing.ranks.global_norm,
            clip=optimizing.clip,
            course=optimizing.course,
            optimizer=optimizing.optimizer,
            average=average if loads is None else InTurn(average, loads),
            signals=MeasuredSignals(passing.ranks.weight_norm, weight_norm_every, sampling),
            log=log,
        )
    )


def make_sampling(
    trainable: Trainable, settings: Settings, next_window: Callable[[], int]
) -> Sampling | None:
    """What is measured now and then, or None where nothing is.

    Weights that lie in shards or stages are not measured one by one, units only where all layers
    lie on this rank, and hooks are not seen in compiled code.
    """
    every = settings.log.details_every
    if not isinstance(every, Steps):
        return None
    passing, model = trainable.passing, trainable.state.model
    measured = model.named_parameters() if passing.has_whole_weights else ()
    has_units = settings.train.compile == "off" and passing.has_all_layers
    sampling = Sampling(
        every.value,
        next_window,
        {name: parameter for name, parameter in measured if parameter.requires_grad},
        settings.log.layers,
        trainable.optimizing.optimizer.optimizer,
        ModeWatch(model),
        UnitWatch(model) if has_units else None,
        passing.clock,
    )
    if passing.loads is not None:
        sampling.loads = passing.loads.measures
    return sampling
