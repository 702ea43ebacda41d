"""`surefoot runs`: lists the runs of a folder. Read-only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table
from surefoot.core.errors import RequestError, SurefootError

if TYPE_CHECKING:
    from surefoot.observe.readers.runs import RunStatus, RunSummary

RESUMABLE = ("stopped", "killed")


def list_runs(
    context: typer.Context,
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the runs.")] = Path("runs"),
    status: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Only runs with this status, such as failed. Repeatable."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only names that match, such as '*gpt*'.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="SET/METRIC", help="Also show the last value of this metric."),
    ] = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """List the runs: status, step, loss, best evaluation, verdict on the contract."""
    from surefoot.observe.formatting import format_duration, format_number
    from surefoot.observe.readers import runs

    session: Session = context.obj
    wanted = _statuses(status or [])
    found = [
        run
        for run in runs.list_runs(root)
        if (not wanted or run.status in wanted) and (name is None or fnmatchcase(run.name, name))
    ]
    extras = [_judged(run, metric) for run in found]
    session.answer(
        {
            "root": root,
            "runs": [
                {**{f.name: getattr(run, f.name) for f in dataclasses.fields(run)}, **extra}
                for run, extra in zip(found, extras, strict=True)
            ],
        }
    )
    if not found:
        session.say(f"no runs in {root}" + (" match" if wanted or name else ""))
        session.next(("surefoot train", "start the first one"))
        return
    named = () if metric is None else (metric,)
    shown = table("run", "status", "step", "loss", "best", *named, "verdict", "took", "last")
    for run, extra in zip(found, extras, strict=True):
        best, value = run.best, extra.get("metric")
        last_value = () if metric is None else (_dash(value, format_number),)
        shown.add_row(
            *cells(
                run.name,
                run.status.value,
                "-" if run.step is None else run.step,
                "-" if run.loss is None else f"{run.loss:.4g}",
                "-" if best is None else f"{best.metric} {best.value:.4g} at {best.step}",
                *last_value,
                extra["verdict"] or "-",
                _dash(run.duration_seconds, format_duration),
                run.note,
            )
        )
    session.console.print(shown)
    commands = [(f"surefoot report {found[-1].path}", "the newest run as a page")]
    commands.append((f"surefoot checkpoint inspect {found[-1].path}", "its checkpoints"))
    resumable = [run for run in found if run.status.value in RESUMABLE]
    if resumable:
        commands.append((f"surefoot train --resume {resumable[-1].path}", "resume it"))
    if len(found) > 1:
        pair = f"{found[-2].path} {found[-1].path}"
        commands.append((f"surefoot compare {pair}", "the two newest"))
    session.next(*commands)


def _statuses(words: list[str]) -> set[RunStatus]:
    """Parses names of statuses.

    Raises:
        RequestError: there is no such status.
    """
    from surefoot.observe.readers.runs import RunStatus

    known = [status.value for status in RunStatus]
    for word in words:
        if word not in known:
            raise RequestError(
                f"unknown status {word!r}",
                where="--status",
                rule=f"a run is one of: {', '.join(known)}",
            )
    return {RunStatus(word) for word in words}


def _judged(run: RunSummary, metric: str | None) -> dict[str, Any]:
    """The verdict on a run, and the last value of a metric if requested."""
    from surefoot.observe.readers.run_data import read_contract, read_run
    from surefoot.observe.run_folder import CONTRACT_NAME

    if metric is None and "kind" not in read_contract(run.path / CONTRACT_NAME):
        return {"verdict": None}  # Nothing to judge: the rows are not read.
    from surefoot.judge.contract import verdict_on

    try:
        data = read_run(run.path)
    except SurefootError:
        return {"verdict": None}
    verdict = verdict_on(data)
    found: dict[str, Any] = {"verdict": None if verdict is None else verdict.standing.value}
    if metric is not None:
        pair = data.judged("last").get(metric)
        found["metric"] = None if pair is None else pair[1]
    return found


def _dash(value: Any, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)
