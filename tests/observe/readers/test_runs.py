"""The list of runs: what became of each, from its folder alone."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from observe.samples import EVALUATION, report
from surefoot.core.errors import RunFolderError
from surefoot.core.reports import Event
from surefoot.observe.events import EventKind, EventLog, failure_event, read_events
from surefoot.observe.metrics_log import MetricsLog, read_rows
from surefoot.observe.readers.runs import list_runs, summarise_run
from surefoot.observe.run_folder import RunFolder


def leave(path: Path, *events: Event, steps: int = 2) -> Path:
    """A run folder as a run would leave it."""
    with RunFolder.create_at(path) as folder:
        folder.write_config("seed: 1\n")
        log = EventLog(folder.events_path)
        for event in events:
            log.on_event(event)
        log.close()
        metrics = MetricsLog(folder.metrics_path)
        for step in range(1, steps + 1):
            metrics.append(report(step, loss=1.0 / step, time=1000.0 + step))
        metrics.close()
    return path


def event(kind: str, moment: float, message: str = "") -> Event:
    return Event(kind, 0, message, {}, moment)


START = event("start", 1000.0)


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        (["start", "save"], "killed"),
        ([], "killed"),
        (["start", "finished"], "finished"),
        (["start", "stopped"], "stopped"),
        (["start", "failure"], "failed"),
        (["start", "stopped", "resume"], "killed"),
        (["start", "stopped", "resume", "finished"], "finished"),
        (["start", "finished", "observer-failed"], "finished"),
    ],
)
def test_the_status_is_what_the_last_stretch_ended_with(
    tmp_path: Path, kinds: list[str], status: str
) -> None:
    events = [event(kind, 1000.0 + i) for i, kind in enumerate(kinds)]
    assert summarise_run(leave(tmp_path / "run", *events)).status == status


def test_a_run_is_known_by_its_last_row_and_its_events(tmp_path: Path) -> None:
    path = leave(tmp_path / "run", START, event("finished", 1060.0, "the horizon is reached"))
    run = summarise_run(path)
    assert (run.name, run.step, run.loss) == ("run", 2, 0.5)
    assert run.started is not None
    assert run.started.timestamp() == 1000.0
    assert run.duration_seconds == 60.0
    assert run.note == "the horizon is reached"


def test_a_run_that_a_process_holds_is_running(tmp_path: Path) -> None:
    path = leave(tmp_path / "run", event("start", time.time() - 100))
    with RunFolder.open(path):
        run = summarise_run(path)
    assert run.status == "running"
    assert run.duration_seconds is not None
    assert 99 < run.duration_seconds < 200
    assert summarise_run(path).status == "killed"


def test_the_time_between_a_stop_and_a_resume_is_not_the_runs(tmp_path: Path) -> None:
    events = [
        START,
        event("save", 1010.0),  # Killed after this sign of life.
        event("resume", 5000.0),
        event("stopped", 5020.0),
        event("resume", 9000.0),
        event("finished", 9003.0),
        event("observer-failed", 9003.5),
    ]
    run = summarise_run(leave(tmp_path / "run", *events))
    assert run.duration_seconds == 10 + 20 + 3.5


def test_a_killed_run_lasts_up_to_its_last_row(tmp_path: Path) -> None:
    assert summarise_run(leave(tmp_path / "run", START, steps=7)).duration_seconds == 7.0


def test_the_best_metric_is_that_of_the_set_and_direction_in_the_record(tmp_path: Path) -> None:
    path = leave(tmp_path / "run", START)
    log = MetricsLog(path / "metrics.jsonl")
    log.resume_at((path / "metrics.jsonl").stat().st_size)
    evaluations = [(0, math.nan, 0.0), (1, 3.0, 0.1), (2, 1.0, 0.9), (3, math.nan, 0.8)]
    for step, loss, accuracy in evaluations:
        log.append(replace(EVALUATION, step=step, metrics={"loss": loss, "accuracy": accuracy}))
        log.append(replace(EVALUATION, step=step, name="other", metrics={"loss": 0.0}))
    log.close()
    best = summarise_run(path).best
    assert best is not None
    assert (best.set_name, best.metric, best.value, best.step) == ("validation", "loss", 1.0, 2)
    deciding = {"set": "validation", "name": "accuracy", "direction": "max"}
    (path / "record.json").write_text(json.dumps({"extra": {"deciding_metric": deciding}}))
    best = summarise_run(path).best
    assert best is not None
    assert (best.metric, best.value, best.step) == ("accuracy", 0.9, 2)


def test_folders_that_are_no_runs_are_left_out_and_damage_is_said(tmp_path: Path) -> None:
    leave(tmp_path / "b", START)
    leave(tmp_path / "a", START)
    (tmp_path / "photos").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "a" / "metrics.jsonl").write_text('{"row":"step",oops}\n')
    (tmp_path / "b" / "metrics.jsonl").unlink()
    damaged, empty = list_runs(tmp_path)
    assert (damaged.name, damaged.loss) == ("a", None)
    assert "metrics.jsonl is damaged" in damaged.note
    assert (empty.name, empty.step, empty.loss) == ("b", None, None)
    with pytest.raises(RunFolderError, match="does not exist"):
        list_runs(tmp_path / "nowhere")


CRASHING = """
import os, sys
from pathlib import Path
from surefoot.core.reports import Event
from surefoot.observe.events import EventLog, failure_event
from surefoot.observe.metrics_log import MetricsLog
from surefoot.observe.record import collect_record, write_record
from surefoot.observe.run_folder import RunFolder
sys.path.insert(0, sys.argv[2])
from observe.samples import EVALUATION, report
folder = RunFolder.create_at(sys.argv[1])
folder.write_config("seed: 1\\n")
folder.write_contract("{}\\n")
write_record(folder, collect_record(name="a", seed=1, data={"digits": "f00"}))
events, log = EventLog(folder.events_path), MetricsLog(folder.metrics_path)
events.on_event(Event("start", 0, "begins", {}, 1000.0))
log.append(report(1))
log.append(EVALUATION)
log.sync()
(folder.checkpoints_path / "step-00000001").mkdir()
(folder.artifacts_path / "sample.txt").write_text("def f():")
if sys.argv[3] == "kill":
    print("ready", flush=True)
    sys.stdin.read()
try:
    raise ValueError("boom")
except ValueError as error:
    events.on_event(failure_event(error, 1))
    raise
"""


@pytest.mark.parametrize(("end", "status"), [("kill", "killed"), ("raise", "failed")])
def test_the_record_is_whole_also_after_a_crash(tmp_path: Path, end: str, status: str) -> None:
    path = tmp_path / "run"
    tests = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", CRASHING, str(path), tests, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if end == "kill":
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    record = json.loads((path / "record.json").read_text())
    assert record["data"] == {"digits": "f00"}
    for key in ("git", "container", "packages", "hardware", "seed", "torch"):
        assert key in record
    assert [row["row"] for row in read_rows(path / "metrics.jsonl")] == ["step", "eval"]
    assert (path / "config.yaml").read_text()
    assert list((path / "checkpoints").iterdir())
    assert list((path / "artifacts").iterdir())
    assert summarise_run(path).status == status
    if end == "raise":
        last = list(read_events(path / "events.jsonl"))[-1]
        assert 'File "<string>"' in str(last.data["traceback"])
        assert last.message == "ValueError: boom"


def test_every_end_has_a_status() -> None:
    assert failure_event(ValueError(), 0).kind == EventKind.FAILURE
