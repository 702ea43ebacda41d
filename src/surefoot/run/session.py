"""What a run writes down about itself before it trains: folder, record, promise, observers.

It reads the parts of a run and changes none of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from surefoot.assembly.deciding import deciding_fields, deciding_metric
from surefoot.assembly.material import Prepared
from surefoot.assembly.run_parts import Assembly
from surefoot.config.building import make_schedule
from surefoot.config.load import Resolved
from surefoot.config.sections import Settings
from surefoot.core.reports import Observer
from surefoot.core.schedules import Undecided
from surefoot.data.sources.stream import StreamPlan
from surefoot.engine.interrupt import StopOnSignal
from surefoot.numerics.modes import mode_sensitive_modules
from surefoot.observe.evaluations import EvaluationFiles
from surefoot.observe.events import read_events
from surefoot.observe.formatting import format_path
from surefoot.observe.readers.run_data import read_contract
from surefoot.observe.record import RunRecord, collect_record, write_record
from surefoot.observe.run_folder import CONFIG_NAME, RunFolder, find_begun_run, naming_folder
from surefoot.observe.sinks import TensorBoardSink
from surefoot.observe.terminal.console import ConsoleView
from surefoot.observe.terminal.view import RunFacts, Unit
from surefoot.observe.watch import flight_recorder_files, set_where_free
from surefoot.parallel.lookout import attached
from surefoot.parallel.sizes import ParameterSizes
from surefoot.run.contract import promise
from surefoot.run.data_sheet import write_data_sheet
from surefoot.run.folder_run import FolderRun, RunResult
from surefoot.run.memory_shortage import memory_table
from surefoot.run.rank_agreement import SharedFolder, agreement
from surefoot.run.resume_rules import BEGUN_FOR_KEY, Resumption, refuse_crash_loop, resume_tier
from surefoot.state.manifest import Manifest
from surefoot.tasks.task import split_dependence

RECORDER = ("TORCH_FR_", "TORCH_NCCL_")
CHECKPOINT_OVERHEAD_BYTES = 1 << 20


def config_of(run: str | Path) -> Path:
    """The configuration file of a run.

    Raises:
        RunFolderError: there is no such run, or it was cut off before it wrote anything down.
    """
    return find_begun_run(run) / CONFIG_NAME


def has_begun(folder: RunFolder | SharedFolder) -> bool:
    """Whether this attempt has begun: one that was refused has left the folder as it was."""
    if not folder.events_path.is_file():
        return False
    attempts = (event.data.get("attempt") for event in read_events(folder.events_path))
    return folder.lease.attempt in attempts


def train_in_folder(
    folder: RunFolder | SharedFolder,
    name: str,
    resolved: Resolved[Any],
    prepared: Prepared,
    assembly: Assembly,
    resumption: Resumption | None = None,
    observers: tuple[Observer, ...] = (),
) -> RunResult:
    """Writes down what the run is, trains it, and gives the folder back.

    Raises:
        SurefootError: the run cannot go on, or failed; the folder says how.
    """
    with StopOnSignal(agreement(assembly)) as stop:
        with naming_folder(folder.path):
            run = _open_run(folder, name, resolved, prepared, assembly, observers)
        with closing(run), ExitStack() as watched:
            with naming_folder(folder.path):
                # In this order: while others may ask for stacks, somebody writes them down.
                watched.enter_context(run.watch)
                watched.enter_context(attached(run.lent(stop)))
                # A resume that is refused leaves the folder as it was.
                resumed = None if resumption is None else _restore(run, resumption)
                if isinstance(folder, RunFolder):
                    folder.write_config(resolved.as_yaml())
                    folder.write_contract(
                        promise(
                            assembly.settings,
                            assembly.material.task,
                            read_contract(folder.contract_path),
                        )
                    )
                    record = make_record(name, prepared, assembly, resumed)
                    write_record(folder, record)
                    prepared.save_artifacts(folder.artifacts_path)
                    write_data_sheet(prepared, folder.artifacts_path)
                if resumption is None:
                    run.begin()
            return run.train(stop, watched)


def _restore(run: FolderRun, resumption: Resumption) -> dict[str, object]:
    """Goes back to the checkpoint that is asked for; returns what the record says of it."""
    settings = run.assembly.settings
    told: dict[str, object] = resumption.told()

    def check(manifest: Manifest) -> None:
        if isinstance(run.folder, RunFolder):
            # The one rank that writes the events decides: the others may see its next one already.
            most = settings.guard.restarts_without_progress
            refuse_crash_loop(read_events(run.folder.events_path), most, manifest.step)
        course, pace = run.assembly.trainable.course, run.assembly.pace
        if begun_for := resumption.begun_for(manifest, pace):
            run.about[BEGUN_FOR_KEY] = begun_for
            course.schedule = make_schedule(settings, pace, begun_for)
        resumption.check(
            manifest, fingerprints=run.about["data"], schedule=course.schedule, pace=pace
        )
        told["tier"] = resume_tier(manifest.about, run.about, settings.deterministic).value

    step = run.restore(told, check, resumption.wanted)
    return {**told, "step": step}


def _open_run(
    folder: RunFolder | SharedFolder,
    name: str,
    resolved: Resolved[Any],
    prepared: Prepared,
    assembly: Assembly,
    observers: tuple[Observer, ...],
) -> FolderRun:
    settings, horizon = assembly.settings, assembly.horizon_updates
    about = {
        "config_hash": resolved.digest,
        "data": prepared.fingerprints(),
        "architecture": prepared.architecture,
        "torch": torch.__version__,
        "ranks": assembly.place.ranks.size,
        "mesh": {axis: size for axis, size, _ in assembly.place.sizes.table()},
        "samples_per_update": assembly.pace.samples_per_update,
        BEGUN_FOR_KEY: horizon if isinstance(horizon, int) else None,
        "device": assembly.trainable.device.type,
    }
    if assembly.trainable.device.type == "cuda" and assembly.place.ranks.size > 1:
        set_where_free(flight_recorder_files(folder.artifacts_path))
    try:
        # From here on all ranks hear a signal; nothing is written before.
        assembly.place.ranks.gather("the run begins", None)
        shown = []
        if isinstance(folder, RunFolder):
            shown = make_observers(settings, name, assembly, folder)
        return FolderRun(assembly, folder, about, [*shown, *observers])
    except BaseException:
        folder.close()
        raise


def needed_bytes(assembly: Assembly, *, resuming: bool = False) -> int:
    """What the checkpoints of a run take at most, one more than are kept while one is written.

    A resumed run has most of them already, and deletes one for each that it writes; one that saves
    at its end alone has no others.
    """
    size = parameter_sizes(assembly)
    one = size.num_bytes + 3 * 4 * size.num_trained + CHECKPOINT_OVERHEAD_BYTES
    section = assembly.settings.checkpoint
    saves_once = section.every == "end" and section.ephemeral_every == "never"
    return one * (2 if resuming or saves_once else section.keep + section.keep_best + 2)


def parameter_sizes(assembly: Assembly) -> ParameterSizes:
    """Of the whole model, on whichever ranks its layers lie."""
    here = ParameterSizes.of(assembly.material.model)
    return here + assembly.trainable.state.layers.size_elsewhere


def make_observers(
    settings: Settings, name: str, assembly: Assembly, folder: RunFolder
) -> list[Observer]:
    """The console and the sinks that the settings ask for."""
    total, unit = progress_of(settings, assembly)
    facts = RunFacts(
        name=name,
        folder=format_path(folder.path),
        total=total,
        unit=unit,
        counts="tokens" if assembly.material.task.unit == "tokens" else "samples",
        device=str(assembly.trainable.device),
        precision=assembly.trainable.precision.name,
    )
    observers: list[Observer] = [EvaluationFiles(folder.artifacts_path)]
    if settings.log.tensorboard:
        observers.append(TensorBoardSink(folder.path / "tensorboard"))
    if settings.log.console != "off":
        view = ConsoleView(facts, settings.log.console)
        view.start()
        observers.append(view)
    return observers


def progress_of(settings: Settings, assembly: Assembly) -> tuple[float, Unit]:
    """Where the run ends, in updates where that is known before."""
    if isinstance(assembly.horizon_updates, int):
        return float(assembly.horizon_updates), "steps"
    horizon: Any = settings.train.horizon
    return float(horizon.value), horizon.kind


def exactness(assembly: Assembly) -> dict[str, object]:
    """What keeps the numbers from being those of another split, and what a resume promises."""
    model = assembly.material.model
    modules = [
        f"{m.name or '(model)'}: {m.kind}, {m.in_train}" for m in mode_sensitive_modules(model)
    ]
    for name, module in model.named_modules():
        if why := getattr(module, "depends_on_split", ""):
            modules.append(f"{name or '(model)'}: {type(module).__name__}, {why}")
    terms = split_dependence(assembly.evaluator.task)
    return {
        "depends_on_the_split": [
            *modules,
            *(f"loss: term {term}, {why}" for term, why in terms.items()),
            *([f"loss: {assembly.coupling}"] if assembly.coupling else ()),
        ],
        "data_order": (
            "the stream's own state"
            if isinstance(assembly.plan, StreamPlan)
            else "a function of seed, epoch and position"
        ),
        "resume": "the same weights, samples and random numbers, each update once",
    }


def make_record(
    name: str,
    prepared: Prepared,
    assembly: Assembly,
    resumed: Mapping[str, object] | None = None,
) -> RunRecord:
    """Everything that another engineer needs to understand or repeat the run.

    Args:
        name: of the run.
        prepared: what it was made from.
        assembly: its parts.
        resumed: where it goes on, with which tier and changes; None where it begins.
    """
    trainable = assembly.trainable
    deciding = deciding_metric(assembly.settings, assembly.material.task)
    return collect_record(
        name=name,
        seed=assembly.settings.seed,
        data={"fingerprints": prepared.fingerprints(), **prepared.facts},
        extra={
            "device": str(trainable.device),
            "flight_recorder": {n: v for n, v in os.environ.items() if n.startswith(RECORDER)},
            "mesh": {axis: size for axis, size, _ in assembly.place.sizes.table()},
            "precision": {"name": trainable.precision.name, "reason": trainable.precision.reason},
            "optimizer_kernel": trainable.optimizer.kernel,
            "skips": trainable.optimizer.skips.value,
            "parameters": parameter_sizes(assembly).num_elements,
            "trainable_parameters": parameter_sizes(assembly).num_trained,
            "samples_per_update": assembly.pace.samples_per_update,
            "tokens_per_sample": assembly.pace.tokens_per_sample,
            "horizon_updates": (
                "undecided"
                if isinstance(assembly.horizon_updates, Undecided)
                else assembly.horizon_updates
            ),
            "deciding_metric": deciding_fields(deciding),
            "memory": memory_table(assembly),
            "exactness": exactness(assembly),
            "resumed": resumed,
            "decay_disagreements": [row.name for row in trainable.ledger.disagreements],
        },
    )
