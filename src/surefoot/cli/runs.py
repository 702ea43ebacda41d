"""`surefoot runs`: the runs of a folder, side by side. Reads what they left; changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table

RESUMABLE = ("stopped", "killed")


def list_runs(
    context: typer.Context,
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the runs.")] = Path("runs"),
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """List the runs: status, step, loss, best evaluation."""
    from surefoot.observe import runs
    from surefoot.observe.text import format_duration

    session: Session = context.obj
    found = runs.list_runs(root)
    session.answer({"root": root, "runs": found})
    if not found:
        session.say(f"no run in {root}")
        session.next(("surefoot train", "makes the first"))
        return
    shown = table("run", "status", "step", "loss", "best", "took", "last")
    for run in found:
        best = run.best
        shown.add_row(
            *cells(
                run.name,
                run.status.value,
                "-" if run.step is None else run.step,
                "-" if run.loss is None else f"{run.loss:.4g}",
                "-" if best is None else f"{best.metric} {best.value:.4g} at {best.step}",
                "-" if run.duration_seconds is None else format_duration(run.duration_seconds),
                run.note,
            )
        )
    session.console.print(shown)
    commands = [(f"surefoot checkpoint inspect {found[-1].path}", "what the newest has saved")]
    resumable = [run for run in found if run.status.value in RESUMABLE]
    if resumable:
        commands.append((f"surefoot train --resume {resumable[-1].path}", "goes on with it"))
    session.next(*commands)
