"""`surefoot check`: preflight on the real model and data. Leaves no files unless asked to."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli.check_equivalence import Finished, Tell, check_equivalence
from surefoot.cli.session import DebugOption, JsonOption, Session, SetOption
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, RequestError

if TYPE_CHECKING:
    from surefoot.verify.resume_proof import ResumeProof

MAX_NAMED = 8


def check(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in one.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="resume or equivalence. Repeatable."),
    ] = None,
    overrides: SetOption = None,
    updates: Annotated[
        int, typer.Option(min=5, metavar="N", help="resume: number of updates to compare.")
    ] = 12,
    kills: Annotated[int, typer.Option(min=1, metavar="N", help="resume: number of kills.")] = 3,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="resume: seed of the kill times; random by default."),
    ] = None,
    nproc: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="equivalence: number of ranks of the layout."),
    ] = 1,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WAY",
            help="equivalence: accumulation, recompute, compile or layout; all by default.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep all files in this empty folder.")
    ] = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> int:
    """Check a recipe on its own model and data before the run.

    `--only resume` trains it, kills it at random times, resumes it, and compares the hash of the
    whole state and the sample ids at every update with those of an uninterrupted run.

    `--only equivalence` computes the first window in one process, then split differently,
    recomputed, compiled and distributed over ranks, and compares the gradient of every parameter.
    """
    session: Session = context.obj
    checks: dict[str, Callable[[Path, Tell], Finished]] = {
        "resume": lambda folder, tell: _resume(
            session, recipe, overrides or [], Moments(updates, kills, seed), folder, tell
        ),
        "equivalence": lambda folder, tell: check_equivalence(
            session, recipe, overrides or [], nproc, against or [], folder, tell
        ),
    }
    _check_names(only or [], tuple(checks))
    finished = {}
    names = tuple(dict.fromkeys(only or []))
    for name in names:
        kept = out if out is None or len(names) == 1 else out / name
        with _folder(kept) as folder, _progress(session) as tell:
            told = checks[name](folder, tell)
        finished[name] = told.answer
        told.say()
    passed = all(answer["passed"] for answer in finished.values())
    code = EXIT_DONE if passed else EXIT_FOUND
    session.answer({"exit_code": code, "passed": passed, "checks": finished})
    if out is not None:
        session.say(f"  kept in {out}")
    return code


@dataclass(frozen=True)
class Moments:
    """When a resume check kills the training."""

    updates: int
    kills: int
    seed: int | None


def _resume(
    session: Session,
    recipe: str,
    overrides: list[str],
    moments: Moments,
    folder: Path,
    tell: Tell,
) -> Finished:
    from surefoot.config.load import load_recipe
    from surefoot.verify.resume_proof import OVERRIDES, evaluation_override, prove_resume

    given = load_recipe(recipe, overrides)
    # The request's own settings come last and take precedence.
    short = [*OVERRIDES, *evaluation_override(given.recipe), *overrides]
    drawn = int.from_bytes(os.urandom(4), "little") if moments.seed is None else moments.seed
    proof = prove_resume(
        load_recipe(recipe, short),
        folder,
        updates=moments.updates,
        kills=moments.kills,
        seed=drawn,
        tell=tell,
    )
    answer = {
        "passed": proof.passed,
        "tier": proof.tier,
        "updates": proof.updates,
        "states_compared": proof.compared,
        "kills": proof.kills,
        "seed": proof.seed,
        "difference": proof.difference,
    }
    return Finished(answer, lambda: _say_resume(session, recipe, proof))


def _check_names(only: list[str], checks: tuple[str, ...]) -> None:
    """Refuses unknown checks.

    Raises:
        RequestError: with the known ones.
    """
    unknown = [name for name in only if name not in checks]
    if unknown or not only:
        raise RequestError(
            f"the check {unknown[0]!r} does not exist" if unknown else "no check is named",
            where="--only",
            rule=f"this version has: {', '.join(checks)}",
            remedy="surefoot check RECIPE --only resume",
        )


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The folder of the check: kept if it was named, else removed afterwards."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RequestError(
                "the folder is not empty",
                where=str(out),
                rule="--out names an empty or new folder",
                remedy="choose another folder",
            )
        out.mkdir(parents=True, exist_ok=True)
        yield out.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="surefoot-check-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _progress(session: Session) -> Iterator[Tell]:
    """A progress line."""
    with session.console.status("starting") as status:
        yield status.update


def _say_resume(session: Session, recipe: str, proof: ResumeProof) -> None:
    from surefoot.run.resume_rules import Tier

    difference = proof.difference
    for kill in proof.kills:
        session.say(
            f"  killed {kill.delay_seconds * 1e3:.0f} ms after update {kill.after_window}, "
            + (f"resumed from update {kill.resumed_at}" if kill.resumed_at else "restarted")
        )
    if proof.tier is Tier.T0:
        session.say(
            f"\nPASS resume, tier T0: {proof.compared} states and the samples of "
            f"{proof.updates} updates are bit-equal",
            style="bold green",
        )
    elif proof.tier is Tier.T1 and difference is not None:
        session.say(
            "\nPASS resume, tier T1: samples, counts and random numbers are equal; the weights "
            f"differ from update {difference.window} on, as do two uninterrupted runs",
            style="bold yellow",
        )
        session.next((f"surefoot check {recipe} --only resume --set deterministic=true", "T0"))
    elif difference is not None:
        named = ", ".join(difference.pieces[:MAX_NAMED])
        more = len(difference.pieces) - MAX_NAMED
        session.say(
            f"\nFAIL resume: at update {difference.window} the resumed run differs",
            style="bold red",
        )
        session.say(f"  first difference: {named}" + (f" and {more} more" if more > 0 else ""))
    session.say(f"  kill times: --seed {proof.seed} --kills {len(proof.kills)}")
