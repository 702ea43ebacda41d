"""From a recipe to a run: the only place where a configuration becomes objects.

Everything is built before a folder is made, so that a recipe that cannot run leaves no trace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from rich.console import Console
from torch import nn

from surefoot import materials
from surefoot.assembly import (
    Assembly,
    assemble,
    make_ledger,
    make_pace,
    make_plan,
    prepare_process,
)
from surefoot.config.building import make_schedule
from surefoot.config.load import Resolved, load_recipe
from surefoot.config.sections import Recipe, Settings
from surefoot.config.sections.optimizers import OptimizerSection
from surefoot.core.counting import updates_in
from surefoot.core.errors import RequestError
from surefoot.core.reports import Observer
from surefoot.core.schedules import Schedule, Undecided
from surefoot.epilogue import finish_with_samples
from surefoot.materials import Prepared, prepare_material
from surefoot.observe.console import ConsoleView
from surefoot.observe.record import collect_record, write_record
from surefoot.observe.run_folder import RunFolder, find_run
from surefoot.observe.sinks import TensorBoardSink
from surefoot.observe.view import RunFacts
from surefoot.optim.ledger import ParameterLedger
from surefoot.resuming import accept_differences
from surefoot.running import FolderRun, RunResult
from surefoot.state.checkpoint import newest_whole
from surefoot.state.tree import join_tree

CHECKPOINT_OVERHEAD_BYTES = 1 << 20
UNIT_OF_HORIZON = {"steps", "tokens", "samples", "epochs", "seconds"}


def run_recipe(
    resolved: Resolved[Recipe],
    *,
    run_root: Path = Path("runs"),
    resume: Path | None = None,
    accept_changes: Sequence[str] = (),
    dry_run: bool = False,
    console: Console | None = None,
) -> RunResult:
    """Trains a recipe in a folder of its own, or goes on with a run.

    Args:
        resolved: the recipe with the origin of each value.
        run_root: the folder that holds the runs.
        resume: a run folder to go on with, from its newest whole checkpoint.
        accept_changes: fields that may differ from the resumed run; `data` accepts changed data.
        dry_run: build everything, run one update and one evaluation, leave no trace.
        console: where the last words are printed; None prints nothing.

    Raises:
        SurefootError: the run cannot start, or failed; its folder says how.
    """
    recipe = resolved.recipe
    if resume is None:
        prepared, assembly = build_run(recipe)
        if dry_run:
            return try_once(assembly)
        folder = RunFolder.create(run_root, recipe.name, needed_bytes=needed_bytes(assembly))
        return _train(resolved, prepared, assembly, folder, None, console)
    changes = accept_differences(find_run(resume) / "config.yaml", resolved, accept_changes)
    folder = RunFolder.open(resume)
    try:
        prepared, assembly = build_run(recipe)
    except BaseException:
        folder.close()
        raise
    told: dict[str, object] = {
        "changes": [str(change) for change in changes],
        "other_data": "data" in accept_changes,
    }
    return _train(resolved, prepared, assembly, folder, told, console)


def build_run(recipe: Recipe) -> tuple[Prepared, Assembly]:
    """Prepares the process, opens the data and builds every part of the run."""
    prepare_process(recipe.settings)
    prepared = prepare_material(recipe)
    return prepared, assemble(prepared.material, recipe.settings)


def _train(
    resolved: Resolved[Recipe],
    prepared: Prepared,
    assembly: Assembly,
    folder: RunFolder,
    resumed: Mapping[str, object] | None,
    console: Console | None,
) -> RunResult:
    recipe = resolved.recipe
    config = json.dumps(resolved.as_dict(), sort_keys=True)
    about = {
        "config_hash": xxhash.xxh3_128_hexdigest(config.encode()),
        "data": prepared.fingerprints(),
        "architecture": prepared.architecture,
        "torch": torch.__version__,
        "ranks": 1,
    }
    observers = make_observers(recipe.settings, recipe.name, assembly, folder)
    run = FolderRun(assembly, folder, about, observers)
    try:
        if resumed is None:
            run.begin()
        else:
            run.restore(resumed, accept_other_data=bool(resumed["other_data"]))
        folder.write_config(resolved.as_yaml())
        folder.write_contract(promise(recipe))
        write_record(folder, make_record(recipe.name, recipe.settings, prepared, assembly))
        prepared.save_artifacts(folder.artifacts_path)
        result = run.train()
    finally:
        run.close()
    if result.status == "finished":
        for line in finish_with_samples(result, prepared, folder.artifacts_path):
            if console is not None:
                console.print(line, markup=False, highlight=False)
    return result


def try_once(assembly: Assembly) -> RunResult:
    """One update and, where there is a validation set, one evaluation batch; leaves no trace."""
    trainable = assembly.trainable
    try:
        windows = assembly.open_windows(trainable.state.progress.cursor)
        trainable.update(next(windows))
        windows.close()  # type: ignore[attr-defined]
        step = trainable.log.settle()
        report = trainable.log.latest
        metrics = {} if report is None else {"train/loss": report.loss}
        metrics |= assembly.evaluate_one_batch()
    finally:
        assembly.close()
    return RunResult(
        None, "dry-run", "built, ran one update", step, metrics, assembly.material.model
    )


def needed_bytes(assembly: Assembly) -> int:
    """What the checkpoints of a run take at most, one more than are kept while one is written."""
    parameters = sum(p.numel() * p.element_size() for p in assembly.material.model.parameters())
    moments = sum(p.numel() * 4 for p in assembly.trainable.optimizer.parameters) * 3
    one = parameters + moments + CHECKPOINT_OVERHEAD_BYTES
    return one * (assembly.settings.checkpoint.keep + 2)


def make_observers(
    settings: Settings, name: str, assembly: Assembly, folder: RunFolder
) -> list[Observer]:
    """The console and the sinks that the settings ask for."""
    horizon = settings.train.horizon
    known = horizon.kind in UNIT_OF_HORIZON
    total: Any = horizon.value if known else assembly.horizon_updates
    facts = RunFacts(
        name=name,
        folder=str(folder.path),
        total=float(total),
        unit=horizon.kind if known else "steps",  # type: ignore[arg-type]
        counts="tokens" if assembly.material.task.unit == "tokens" else "samples",
        device=str(assembly.trainable.device),
        precision=assembly.trainable.precision.name,
    )
    observers: list[Observer] = []
    if settings.log.console != "off":
        view = ConsoleView(facts, settings.log.console)
        view.start()
        observers.append(view)
    if settings.log.tensorboard:
        observers.append(TensorBoardSink(folder.path / "tensorboard"))
    return observers


def make_record(name: str, settings: Settings, prepared: Prepared, assembly: Assembly) -> Any:
    """Everything that another engineer needs to understand or repeat the run."""
    trainable = assembly.trainable
    metric, direction = assembly.material.task.deciding_metric
    return collect_record(
        name=name,
        seed=settings.seed,
        data={"fingerprints": prepared.fingerprints(), **prepared.facts},
        extra={
            "device": str(trainable.device),
            "precision": {"name": trainable.precision.name, "reason": trainable.precision.reason},
            "optimizer_kernel": trainable.optimizer.kernel,
            "skips": trainable.optimizer.skips.value,
            "parameters": sum(p.numel() for p in assembly.material.model.parameters()),
            "trainable_parameters": sum(p.numel() for p in trainable.optimizer.parameters),
            "samples_per_update": assembly.plan.samples_per_window,
            "tokens_per_sample": assembly.pace.tokens_per_sample,
            "horizon_updates": (
                "undecided"
                if isinstance(assembly.horizon_updates, Undecided)
                else assembly.horizon_updates
            ),
            "deciding_metric": {"name": metric, "direction": direction},
            "decay_disagreements": [row.name for row in trainable.ledger.disagreements],
        },
    )


def promise(recipe: Recipe) -> dict[str, object]:
    """What the run promises, for `contract.yaml`."""
    return {
        "horizon": str(recipe.train.horizon),
        "non_finite": recipe.guard.non_finite,
        "resume": "exact: same weights, same samples, each update once",
        "deterministic_kernels": recipe.deterministic,
    }


def build_model(recipe: Recipe) -> nn.Module:
    """The model of a recipe, with fresh weights of its seed; opens the data for its sizes."""
    prepare_process(recipe.settings)
    return prepare_material(recipe).material.model


def build_ledger(model: nn.Module, section: OptimizerSection) -> ParameterLedger:
    """The parameter groups that an optimizer section makes of a model."""
    return make_ledger(model, section)


def build_schedule(recipe: Recipe) -> tuple[Schedule, int | None]:
    """The schedule of a recipe and its horizon in updates, None where that is not known.

    Opens the data for its length.
    """
    prepared = prepare_material(recipe)
    pace = make_pace(prepared.material, make_plan(len(prepared.material.train), recipe.settings))
    updates = updates_in(recipe.train.horizon, pace)
    return make_schedule(recipe, pace), None if isinstance(updates, Undecided) else updates


class LoadedRun:
    """A trained model, and where it comes from."""

    def __init__(self, model: nn.Module, recipe: Recipe, step: int, folder: Path) -> None:
        self.model = model
        """In evaluation mode, on the CPU."""
        self.recipe = recipe
        self.step = step
        self.folder = folder


def load(run: str | Path, model: nn.Module | None = None) -> LoadedRun:
    """Loads the model of a run from its newest whole checkpoint. Executes nothing from it.

    Args:
        run: the run folder.
        model: for a run whose model was handed to `Trainer`: a module of the same class.

    Raises:
        RunFolderError: there is no such run.
        CheckpointError: there is no whole checkpoint, or it is of another model.
        RequestError: the model cannot be built from the run alone.
    """
    folder = find_run(Path(run))
    path, manifest, snapshot, _ = newest_whole(folder / "checkpoints")
    recipe = load_recipe(folder / "config.yaml").recipe
    if model is None:
        architecture = manifest.about.get("architecture")
        if architecture is None:
            raise RequestError(
                "the model of this run was handed in as an object",
                where=str(folder),
                rule="a model is built from a recipe, or given",
                remedy="surefoot.load(RUN, model=MyModel())",
            )
        model = materials.build_model(architecture)
    model.load_state_dict(join_tree(snapshot)["model"])
    return LoadedRun(model.eval(), recipe, manifest.step, path)
