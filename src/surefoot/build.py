"""From a recipe to a run: the only place where a configuration becomes objects.

Everything is built before a folder is made, so that a recipe that cannot run leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from torch import nn

from surefoot.assembly import material as materials
from surefoot.assembly.loading import make_order, make_pace, make_plan
from surefoot.assembly.material import Prepared, prepare_material
from surefoot.assembly.optimizer_side import make_ledger
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Assembly
from surefoot.config.building import make_schedule
from surefoot.config.load import Resolved, load_recipe
from surefoot.config.sections import Recipe
from surefoot.config.sections.optimizers import OptimizerSection
from surefoot.core.counting import updates_in
from surefoot.core.errors import RequestError
from surefoot.core.schedules import Schedule, Undecided
from surefoot.observe.run_folder import (
    ARTIFACTS_NAME,
    CHECKPOINTS_NAME,
    RunFolder,
    config_of,
    find_run,
)
from surefoot.optim.ledger import ParameterLedger
from surefoot.parallel.pipeline_schedule import PipelineOrder
from surefoot.run.dry_run import try_once
from surefoot.run.folder_run import RunResult
from surefoot.run.session import RunHooks, RunRequest, start_run
from surefoot.run.start import ResumeRequest
from surefoot.run.text_samples import finish_with_samples
from surefoot.state.checkpoint import newest_whole, read_checkpoint
from surefoot.state.manifest import MANIFEST_NAME
from surefoot.state.run_state import check_same_tensors, naming_state, weights_of


def run_recipe(
    resolved: Resolved[Recipe],
    *,
    run_root: Path = Path("runs"),
    resume: Path | None = None,
    accept_changes: Sequence[str] = (),
    dry_run: bool = False,
    console: Console | None = None,
    on_end: Callable[[Path], None] = lambda folder: None,
) -> RunResult:
    """Trains a recipe in a folder of its own, or goes on with a run.

    Args:
        resolved: the recipe with the origin of each value.
        run_root: the folder that holds the runs.
        resume: a run folder to go on with, from its newest whole checkpoint; or one of its
            checkpoints: newer ones are put aside.
        accept_changes: fields that may differ from the resumed run; `data` accepts changed data,
            `metrics.jsonl` a log that does not fit and is begun anew.
        dry_run: build everything, run one update and one evaluation, leave no trace.
        console: where the last words are printed; None prints nothing.
        on_end: is told the folder of the run once that is given back, however the run ended; on
            one rank only.

    Raises:
        SurefootError: the run cannot start, or failed; its folder says how.

    >>> run_recipe(load_recipe("diabetes-mlp"), dry_run=True).status
    'dry-run'
    """
    recipe = resolved.recipe
    # Once, before any code of the user's own may change the working directory.
    run_root, run = run_root.absolute(), None if resume is None else resume.absolute()

    def say(line: str) -> None:
        if console is not None:
            console.print(line, markup=False, highlight=False)

    def finish(result: RunResult, prepared: Prepared) -> None:
        assert result.folder is not None
        for line in finish_with_samples(result, prepared, result.folder / ARTIFACTS_NAME):
            say(line)

    asked = RunRequest(
        recipe.name,
        resolved,
        prepare=lambda resuming: prepare_material(recipe, resuming=resuming),
        make_folder=lambda needed_bytes: RunFolder.create(
            run_root, recipe.name, needed_bytes=needed_bytes
        ),
        resume=None if run is None else ResumeRequest(run, _read_recipe, tuple(accept_changes)),
        hooks=RunHooks(
            say=say,
            on_assembled=lambda assembly: _show_mesh(assembly, console),
            on_finished=finish,
            on_end=on_end,
        ),
    )
    return try_once(asked) if dry_run else start_run(asked)


def _read_recipe(run: Path) -> Resolved[Recipe]:
    return load_recipe(config_of(run))


def _show_mesh(assembly: Assembly, console: Console | None) -> None:
    """How the ranks are used, with what each axis costs; nothing for one rank."""
    place = assembly.place
    if console is None or place.mesh is None:
        return
    data = place.num_data_ranks
    console.print(f"{place.ranks.size} ranks, {data} of them with data of their own:")
    for axis, size, costs in place.sizes.table():
        console.print(f"  {axis:<10} {size:>4}   {costs}", markup=False, highlight=False)
    if place.sizes.pipeline > 1:
        settings = assembly.settings
        order = PipelineOrder.of(settings.parallel, place.sizes.pipeline)
        idle = order.bubble_fraction(settings.train.accumulation)
        console.print(f"{order.num_stages} stages, {order.kind}: ranks idle {idle:.1%} of a window")


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
    material = prepared.material
    order = make_order(material.train, recipe.settings)
    plan = make_plan(material.train, recipe.settings, order=order)
    pace = make_pace(material.train, material.task, plan, material.model, recipe.settings)
    updates = updates_in(recipe.train.horizon, pace)
    return make_schedule(recipe, pace), None if isinstance(updates, Undecided) else updates


@dataclass(frozen=True)
class LoadedRun:
    """A trained model, and where it comes from.

    >>> LoadedRun(nn.Identity(), step=100, checkpoint=Path("step-00000100")).step
    100
    """

    model: nn.Module = field(repr=False)
    """In evaluation mode, on the CPU."""
    step: int
    """Updates that its weights have seen."""
    checkpoint: Path
    """The folder that the weights were read from."""


def load(run: str | Path, model: nn.Module | None = None) -> LoadedRun:
    """Loads the model of a run from its newest whole checkpoint, or of one checkpoint.

    Executes nothing from it.

    A model of the user's own class is imported by its name, as the recipe named it.

    Args:
        run: the run folder, or the folder of a checkpoint.
        model: for a run whose model was handed to `Trainer`: a module of the same class.

    Raises:
        RunFolderError: there is no such run.
        CheckpointError: there is no whole checkpoint, or it is of another model.
        RequestError: the model cannot be built from the run alone.

    >>> import tempfile
    >>> recipe = load_recipe("diabetes-mlp", ["train.horizon=3 steps", "log.console=off"])
    >>> trained = run_recipe(recipe, run_root=Path(tempfile.mkdtemp()))
    >>> load(trained.folder).step
    3
    """
    folder = Path(run)
    if (folder / MANIFEST_NAME).is_file():
        checkpoint = folder
        manifest, snapshot = read_checkpoint(folder)
    else:
        checkpoint, manifest, snapshot, _ = newest_whole(find_run(run) / CHECKPOINTS_NAME)
    if model is None:
        architecture = manifest.about.get("architecture")
        if architecture is None:
            raise RequestError(
                "the model of this run was handed in as an object",
                where=str(folder),
                rule="a model is built from a recipe, or given",
                remedy=f'surefoot.load("{folder}", model=M), M of the class and sizes that were '
                "trained",
            )
        with naming_state():
            materials.refuse_other_than_modules(architecture)
        model = materials.build_model(architecture)
    weights = weights_of(snapshot)
    check_same_tensors(model.state_dict(), weights)
    model.load_state_dict(weights)
    return LoadedRun(model.eval(), manifest.step, checkpoint)
