"""Lists the runs below a folder, each from its own files alone. Changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from surefoot.core.errors import DataError, RunFolderError
from surefoot.core.reports import Event
from surefoot.observe.events import BEGINNINGS, ENDS, EventKind, read_events
from surefoot.observe.files.lock import is_in_use
from surefoot.observe.metrics_log import last_step_row
from surefoot.observe.metrics_schema import number
from surefoot.observe.readers.stretches import stretches_of
from surefoot.observe.run_folder import (
    CONFIG_NAME,
    EVENTS_NAME,
    METRICS_NAME,
    RECORD_NAME,
)


class RunStatus(StrEnum):
    """State of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """Stopped on request; can be resumed."""
    KILLED = "killed"
    """Its process ended without writing an end event; can be resumed."""


_STATUS_OF_END = {
    EventKind.FINISHED: RunStatus.FINISHED,
    EventKind.FAILURE: RunStatus.FAILED,
    EventKind.STOPPED: RunStatus.STOPPED,
}


@dataclass(frozen=True, slots=True)
class BestMetric:
    """The best value of the deciding metric."""

    set_name: str
    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a list. None: unknown from the run's files."""

    path: Path
    name: str
    status: RunStatus
    step: int | None
    loss: float | None
    """Step of the last update in the log."""
    best: BestMetric | None
    started: datetime | None
    duration_seconds: float | None
    """Wall time, summed over the attempts. A killed attempt counts up to its last written event or
    row."""
    note: str
    """The last event's message, or what is wrong with the files of the folder."""


def list_runs(root: str | Path) -> list[RunSummary]:
    """Every run folder directly under `root`, oldest first.

    Raises:
        RunFolderError: `root` is not a folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise RunFolderError(
            "The folder of the runs does not exist.",
            where=str(root),
            remedy="name the folder that contains the run folders, or start a run",
        )
    names = (CONFIG_NAME, RECORD_NAME, EVENTS_NAME)
    folders = [
        path
        for path in sorted(root.iterdir())
        if path.is_dir() and any((path / name).is_file() for name in names)
    ]
    return [summarise_run(path) for path in folders]


def summarise_run(path: Path) -> RunSummary:
    """Summary of one run folder; damaged files are reported in it, not raised."""
    problems: list[str] = []
    running = is_in_use(path)
    events = list(read_events(path / EVENTS_NAME)) if (path / EVENTS_NAME).is_file() else []
    last: dict[str, float] = {}
    best = None
    metrics_path = path / METRICS_NAME
    if metrics_path.is_file():
        try:
            if row := last_step_row(metrics_path):
                last = {name: number(row[name]) for name in ("step", "loss", "time")}
            best = best_metric(metrics_path, *_deciding_metric(path / RECORD_NAME))
        except (ValueError, KeyError, DataError) as error:
            problems.append(f"{METRICS_NAME} is damaged: {error}")
    last_seen = last.get("time")
    if running:
        last_seen = datetime.now().timestamp()
    stretches = stretches_of(events, last_seen)
    messages = problems or [event.message for event in events[-1:]]
    return RunSummary(
        path=path,
        name=path.name,
        status=_status(events, running),
        step=int(last["step"]) if last else None,
        loss=last.get("loss"),
        best=best,
        started=datetime.fromtimestamp(stretches[0].began) if stretches else None,
        duration_seconds=sum(s.seconds for s in stretches) if stretches else None,
        note=messages[0] if messages else "",
    )


def best_metric(path: Path, set_name: str | None, metric: str, direction: str) -> BestMetric | None:
    """The best evaluation in a metrics log; NaN is never the best.

    Args:
        set_name: the deciding validation set; None: the one evaluated first.
        direction: `min` or `max`.
    """
    best: BestMetric | None = None
    sign = 1 if direction == "min" else -1
    with open(path, "rb") as file:
        for line in file:
            # `row` is the first key, so that rows of updates need no parsing.
            if not line.startswith(b'{"row":"eval"') or not line.endswith(b"\n"):
                continue
            row = json.loads(line)
            set_name = set_name or row["name"]
            if row["name"] != set_name or metric not in row["metrics"]:
                continue
            value = number(row["metrics"][metric])
            if not math.isnan(value) and (best is None or sign * value < sign * best.value):
                best = BestMetric(row["name"], metric, value, row["step"])
    return best


def _deciding_metric(record_path: Path) -> tuple[str | None, str, str]:
    """Set, metric and direction, from the keys `set` (optional), `name` and `direction` of the
    record's `extra.deciding_metric`.
    """
    try:
        extra = json.loads(record_path.read_text("utf-8")).get("extra", {})
        fields = extra.get("deciding_metric", {})
        return fields.get("set"), fields.get("name", "loss"), fields.get("direction", "min")
    except (OSError, ValueError, AttributeError):
        return None, "loss", "min"


def _status(events: Sequence[Event], running: bool) -> RunStatus:
    if running:
        return RunStatus.RUNNING
    for event in reversed(events):
        if event.kind in ENDS:
            return _STATUS_OF_END[EventKind(event.kind)]
        if event.kind in BEGINNINGS:
            break
    return RunStatus.KILLED
