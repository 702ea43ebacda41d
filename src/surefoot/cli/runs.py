"""`surefoot runs`: the runs of a folder, side by side. Reads what they left; changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.session import DebugOption, JsonOption, Session, cells, table
from surefoot.core.errors import EXIT_DONE, RunFolderError

EVAL_TAIL_BYTES = 1 << 20
"""How far back from its end a log is searched for the last evaluation."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of the list. None stands where a run has left no such number yet."""

    folder: Path
    status: str
    """`running`; the kind of its last event that ends one; or `killed`: not running, and no end."""
    step: int | None
    loss: float | str | None
    """Training loss of the last update."""
    evaluation: Mapping[str, object]
    """Metrics of the last evaluation."""
    checkpoints: int
    about: str
    """What its last event says."""


def list_runs(
    context: typer.Context,
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the runs.")] = Path("runs"),
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> int:
    """List the runs: status, step, loss, last evaluation."""
    session: Session = context.obj
    if not root.is_dir():
        raise RunFolderError(
            "there is no folder of runs here",
            where=str(root),
            remedy="surefoot train   makes one, or name another: surefoot runs DIR",
        )
    found = [summarise(path) for path in sorted(root.iterdir()) if _is_run(path)]
    session.answer({"root": root, "runs": found})
    if not found:
        session.say(f"no run in {root}")
        session.next(("surefoot train", "makes the first"))
        return EXIT_DONE
    shown = table("run", "status", "step", "loss", "evaluation", "checkpoints")
    for run in found:
        metrics = ", ".join(f"{name} {_short(value)}" for name, value in run.evaluation.items())
        shown.add_row(
            *cells(
                run.folder.name,
                run.status,
                "-" if run.step is None else run.step,
                _short(run.loss),
                metrics or "-",
                run.checkpoints,
            )
        )
    session.console.print(shown)
    resumable = [run for run in found if run.status in ("stopped", "killed") and run.checkpoints]
    commands = [(f"surefoot checkpoint inspect {found[-1].folder}", "what the newest has saved")]
    if resumable:
        commands.append((f"surefoot train --resume {resumable[-1].folder}", "goes on with it"))
    session.next(*commands)
    return EXIT_DONE


def summarise(folder: Path) -> RunSummary:
    """What a run folder says about its run.

    Raises:
        DataError: a line inside its metrics log is no row.
    """
    from surefoot.observe.events import read_events
    from surefoot.observe.lock import is_in_use
    from surefoot.observe.metrics_log import last_step_row
    from surefoot.observe.run_folder import CHECKPOINTS_NAME, EVENTS_NAME, METRICS_NAME

    events_path, metrics_path = folder / EVENTS_NAME, folder / METRICS_NAME
    events = list(read_events(events_path)) if events_path.is_file() else []
    row = last_step_row(metrics_path) if metrics_path.is_file() else None
    row = row or {}
    step, loss = row.get("step"), row.get("loss")
    return RunSummary(
        folder=folder,
        status="running" if is_in_use(folder) else _end([event.kind for event in events]),
        step=step if isinstance(step, int) else None,
        loss=loss if isinstance(loss, float | int | str) else None,
        evaluation=_last_evaluation(metrics_path),
        checkpoints=sum(1 for _ in (folder / CHECKPOINTS_NAME).glob("step-*/manifest.json")),
        about=events[-1].message if events else "",
    )


def _is_run(path: Path) -> bool:
    from surefoot.observe.run_folder import CONFIG_NAME, RECORD_NAME

    return any((path / name).is_file() for name in (CONFIG_NAME, RECORD_NAME))


def _end(kinds: list[str]) -> str:
    """How a run that is not running came to its end, from the kinds of its events."""
    from surefoot.observe.events import BEGINNINGS, ENDS

    for kind in reversed(kinds):
        if kind in ENDS:
            return kind
        if kind in BEGINNINGS:
            break
    return "killed"


def _last_evaluation(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - EVAL_TAIL_BYTES))
        lines = file.read().split(b"\n")
    for line in reversed(lines[:-1]):
        if line.startswith(b'{"row":"eval"'):
            metrics: Mapping[str, object] = json.loads(line)["metrics"]
            return metrics
    return {}


def _short(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
