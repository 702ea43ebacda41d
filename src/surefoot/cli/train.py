"""`surefoot train`: trains a recipe, or resumes a run. All decisions are the library's."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.ending import Ending, show_verdict
from surefoot.cli.session import DebugOption, JsonOption, Session, SetOption
from surefoot.core.errors import EXIT_DONE, RankError, RequestError, StopRequested
from surefoot.observe.formatting import format_number, format_path

if TYPE_CHECKING:
    from surefoot.run.folder_run import RunResult

RESUME_HELP = (
    "Resume this run folder from its newest checkpoint, or from its RUN/checkpoints/step-…."
)
DEFAULT_RECIPE = "stdlib-gpt"
DEFAULT_RUNS = Path("runs")


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help=f"A recipe file, or the name of a built-in one (default: {DEFAULT_RECIPE}).",
            show_default=False,
        ),
    ] = None,
    overrides: SetOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help=RESUME_HELP),
    ] = None,
    accept_change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="On a resume, accept that this value differs from the run's. Repeatable.",
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks on this machine.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, run one batch, leave no files.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="EVENT", help="Run the update of an event again (RUN/artifacts/bad-batches/…)."
        ),
    ] = None,
    runs: Annotated[
        Path, typer.Option(metavar="DIR", help="Parent folder of the new run folder.")
    ] = DEFAULT_RUNS,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> int:
    """Train a recipe. Default: a small GPT on the source of Python's standard library."""
    session: Session = context.obj
    _check_request(recipe, resume, accept_change or [], dry_run)
    if replay is not None:
        if recipe or overrides or resume or dry_run or nproc > 1:
            raise RequestError(
                "--replay is combined with another option",
                where="--replay",
                rule="a replay repeats the run's own update, in one process",
                remedy="use only: surefoot train --replay EVENT",
            )
        return _replay(session, replay)
    from surefoot.engine.interrupt import stopped_before_begin

    with stopped_before_begin():
        if nproc > 1:
            return _launch(context, session, nproc)
        _become_rank(session)
        from surefoot.build import run_recipe
        from surefoot.config.load import load_recipe
        from surefoot.config.notes import notes

        if resume is not None and recipe is None:
            recipe = _recipe_of(resume)
        resolved = load_recipe(recipe or DEFAULT_RECIPE, overrides or [])
        session.advise(notes(resolved))
        ending = Ending(session)
        result = run_recipe(
            resolved,
            run_root=runs,
            resume=resume,
            accept_changes=tuple(accept_change or ()),
            dry_run=dry_run,
            console=session.console,
            on_end=ending,
        )
    if session.quiet:
        # Only rank 0 judges whether a stop is resumable or a broken contract, and may still be
        # writing it down: a launcher would end it at the first other exit code.
        return EXIT_DONE
    made_in = runs if resume is None or result.folder is None else result.folder.parent
    return _tell(session, result, recipe, overrides or [], made_in, ending)


def _replay(session: Session, event: Path) -> int:
    """Repeats one update and prints the result."""
    from surefoot.observe.bad_batches import read_event

    _recipe_of(read_event(event)[0])
    from surefoot.verify.replay import replay

    done = replay(event)
    session.answer({"exit_code": EXIT_DONE, "is_same": done.is_same, **vars(done)})
    session.say(
        f"window {done.window} repeated, from {done.begun_from}, after {done.num_rerun} others",
        style="bold",
    )
    for name, value in done.found.items():
        session.say(f"  {name}  {value!r}  (recorded: {done.recorded[name]!r})")
    session.say(f"  {'bit-equal' if done.is_same else 'NOT the same as recorded'}")
    session.say(f"  {done.meaning}")
    session.say("largest gradients, before clipping:")
    for name, value in done.largest_gradients.items():
        session.say(f"  {name}  {format_number(value)}")
    session.next((f"surefoot train --resume {done.run}", "resume from the newest checkpoint"))
    return EXIT_DONE


def _launch(context: typer.Context, session: Session, num_ranks: int) -> int:
    """Runs this command once per rank; rank 0 prints for all.

    Raises:
        RequestError: this process is a rank already, or the recipe asks for another mesh.
        RankError: a rank was killed, hangs, or ended without reporting an error.
        StopRequested: a rank was stopped before it had started training.
    """
    from surefoot.config.load import load_recipe
    from surefoot.engine.interrupt import ASKING_SIGNALS
    from surefoot.parallel.join import launched_ranks
    from surefoot.parallel.launch import launch
    from surefoot.parallel.lost import How
    from surefoot.parallel.mesh import resolve_sizes

    given = context.params
    if launched_ranks() > 1:
        raise RequestError(
            f"--nproc {num_ranks} is given to one of {launched_ranks()} ranks of a launcher",
            where="--nproc",
            rule="ranks are started once: by --nproc, or by a launcher such as torchrun",
            remedy="leave --nproc out",
        )
    recipe = given["recipe"]
    if given["resume"] is not None and recipe is None:
        recipe = _recipe_of(given["resume"])
    resolved = load_recipe(recipe or DEFAULT_RECIPE, given["overrides"] or [])
    resolve_sizes(resolved.recipe.parallel, num_ranks)
    deadline = float(resolved.recipe.parallel.deadline.value)
    ended = launch(["surefoot", "train", *_as_arguments(given)], num_ranks, deadline)
    if ended.failure is not None and ended.failure.how is How.HANGS:
        raise ended.failure.error()
    if ended.killed_by in ASKING_SIGNALS:
        # A training rank saves when it gets a signal: this one had not started, or had ended.
        raise StopRequested(
            f"rank {ended.rank} was stopped by {ended.killed_by.name} outside of training",
            rule="earlier checkpoints are complete",
            remedy="start or resume the run again",
        )
    if ended.killed_by is not None:
        raise RankError(
            f"rank {ended.rank} was ended by {ended.killed_by.name}",
            where=f"one of {num_ranks} ranks on this machine",
            rule="a launch ends when its first rank fails",
            remedy="SIGKILL often means that the machine ran out of memory: see the system's log",
        )
    if ended.failure is not None and ended.failure.how is How.GONE:
        # It has reported nothing, and the others left because it is missing.
        raise ended.failure.error(f"one of {num_ranks} ranks on this machine")
    return ended.exit_code


def _as_arguments(given: Mapping[str, Any]) -> list[str]:
    """The command line of a rank: all options except `--nproc`."""
    pairs = [("--set", value) for value in given["overrides"] or ()]
    pairs += [("--accept-change", value) for value in given["accept_change"] or ()]
    pairs += [
        (option, str(given[name]))
        for option, name in (("--resume", "resume"), ("--runs", "runs"), ("--json", "json_file"))
        if given[name] is not None
    ]
    flags = [f for f, name in (("--dry-run", "dry_run"), ("--debug", "debug")) if given[name]]
    recipe = [] if given["recipe"] is None else [given["recipe"]]
    return [*recipe, *(word for pair in pairs for word in pair), *flags]


def _become_rank(session: Session) -> None:
    """Joins the ranks of a launcher, if there is one; all but rank 0 print nothing."""
    if "RANK" not in os.environ:
        return
    from surefoot.parallel.join import join_ranks, launched_ranks
    from surefoot.parallel.launch import end_with_launcher

    if launched_ranks() == 1:
        return
    session.quiet = os.environ["RANK"] != "0"
    session.is_rank = True
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher()
    join_ranks()


def _recipe_of(run: Path) -> str:
    """The configuration file of a run that was started from a recipe.

    Raises:
        RequestError: the run was started in Python, with a model object.
    """
    from surefoot.config.yaml_text import read_yaml
    from surefoot.observe.run_folder import CONFIG_NAME, read_config, run_and_checkpoint

    folder, _ = run_and_checkpoint(run)
    if "model" not in read_yaml(read_config(folder), CONFIG_NAME)[0]:
        raise RequestError(
            "this run was started in Python, with a model object",
            where=str(run),
            rule="the command line resumes runs that a recipe describes",
            remedy=f'in the script that created its Trainer: trainer.fit(resume="{run}")',
        )
    return str(folder / CONFIG_NAME)


def _check_request(
    recipe: str | None, resume: Path | None, changes: list[str], dry_run: bool
) -> None:
    """Refuses invalid combinations of options.

    Raises:
        RequestError: with the remedy.
    """
    if changes and resume is None:
        raise RequestError(
            "--accept-change is given without --resume",
            where="--accept-change",
            rule="a new run has no earlier configuration to differ from",
            remedy="leave it out, or name the run with --resume RUN",
        )
    if dry_run and resume is not None:
        raise RequestError(
            "--dry-run is given with --resume",
            where="--dry-run",
            rule="a dry run builds a new run and leaves no files",
            remedy="use only one of the two",
        )


def _tell(
    session: Session,
    result: RunResult,
    recipe: str | None,
    overrides: list[str],
    runs: Path,
    ending: Ending,
) -> int:
    """Prints the end of a run and suggestions; returns the exit code."""
    stopped = result.status == "stopped"
    code = ending.code(result.status)
    verdict = ending.verdict
    session.answer(
        {
            "exit_code": code,
            "status": result.status,
            "reason": result.reason,
            "folder": result.folder,
            "step": result.step,
            "metrics": result.metrics,
            "verdict": None if verdict is None else verdict.as_json(),
            "report": ending.report,
        }
    )
    session.say(f"\n{result.status} at step {result.step}: {result.reason}", style="bold")
    for name, value in result.metrics.items():
        session.say(f"  {name}  {format_number(value)}")
    if verdict is not None:
        show_verdict(session, verdict)
    report = None if ending.report is None else format_path(ending.report)
    if result.folder is None:
        sets = [word for override in overrides for word in ("--set", override)]
        command = shlex.join(["surefoot", "train", *([recipe] if recipe else []), *sets])
        session.next((command, "run it"))
    elif stopped:
        session.next(
            (f"surefoot train --resume {format_path(result.folder)}", "resume where it stopped"),
            (f"{report}", "the run as a page"),
        )
    else:
        folder = format_path(result.folder)
        list_command = "surefoot runs" + ("" if runs == DEFAULT_RUNS else f" {runs}")
        session.next(
            (f"{report}", "the run as a page"),
            (f"surefoot checkpoint inspect {folder}", "its checkpoints"),
            (list_command, "list all runs"),
            (f'surefoot.load("{folder}").model', "load the trained model in Python"),
        )
    return code
