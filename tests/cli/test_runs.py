"""`surefoot runs`: the status, numbers and order of what lies in a folder of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.cli import main as command
from surefoot.cli.runs import summarise
from surefoot.core.errors import EXIT_DONE, EXIT_REQUEST
from surefoot.core.reports import EvalReport, Event, StepReport
from surefoot.observe.events import EventLog
from surefoot.observe.metrics_log import MetricsLog
from surefoot.observe.run_folder import RunFolder

Capture = pytest.CaptureFixture[str]


def step_report(step: int, loss: float) -> StepReport:
    return StepReport(
        step=step,
        window=step,
        epoch=0,
        samples=step,
        tokens=0,
        loss=loss,
        terms={},
        weight=1.0,
        grad_norm=1.0,
        clipped=False,
        applied=True,
        lr={"decay": 0.1},
        loss_scale=1.0,
    )


def make_run(root: Path, name: str, kinds: list[str], losses: list[float]) -> RunFolder:
    folder = RunFolder.create(root, name)
    folder.write_config("name: x\n")
    events = EventLog(folder.events_path)
    for kind in kinds:
        events.on_event(Event(kind, 0, kind, {}, 1.0))
    events.close()
    log = MetricsLog(folder.metrics_path)
    for step, loss in enumerate(losses, start=1):
        log.on_step(step_report(step, loss))
        log.on_eval(EvalReport(step, "validation", {"loss": loss / 2}, 1.0, 1))
    log.close()
    return folder


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        (["start", "finished"], "finished"),
        (["start", "save", "stopped"], "stopped"),
        (["start", "failure"], "failure"),
        (["start", "save"], "killed"),
        (["start", "stopped", "resume"], "killed"),
        (["start", "stopped", "resume", "finished", "save"], "finished"),
        ([], "killed"),
    ],
)
def test_the_status_is_read_from_the_events(kinds: list[str], status: str, tmp_path: Path) -> None:
    with make_run(tmp_path, "a", kinds, [1.0]) as folder:
        assert summarise(folder.path).status == "running"
    assert summarise(folder.path).status == status


def test_the_numbers_are_those_of_the_last_rows(tmp_path: Path) -> None:
    with make_run(tmp_path, "a", ["start"], [3.0, 2.0]) as folder:
        summary = summarise(folder.path)
    assert (summary.step, summary.loss, summary.evaluation) == (2, 2.0, {"loss": 1.0})


def test_a_run_without_rows_has_no_numbers(tmp_path: Path) -> None:
    with make_run(tmp_path, "a", [], []) as folder:
        summary = summarise(folder.path)
    assert (summary.step, summary.loss, summary.evaluation) == (None, None, {})


def test_the_list(tmp_path: Path, capsys: Capture) -> None:
    make_run(tmp_path, "first", ["start", "finished"], [3.0]).close()
    second = make_run(tmp_path, "second", ["start"], [float("nan")])
    second.close()
    (second.checkpoints_path / "step-00000001").mkdir()
    (second.checkpoints_path / "step-00000001" / "manifest.json").write_text("{}")
    (tmp_path / "not a run").mkdir()
    (tmp_path / "file").write_text("")
    assert command.run(["runs", str(tmp_path)]) == EXIT_DONE
    out = capsys.readouterr().out
    assert out.index("_first") < out.index("_second")
    assert "not a run" not in out
    assert "NaN" in out
    assert f"surefoot train --resume {second.path}" in out
    assert command.run(["runs", str(tmp_path), "--json", "-"]) == EXIT_DONE
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["status"] for row in rows] == ["finished", "killed"]
    assert [row["checkpoints"] for row in rows] == [0, 1]


def test_an_empty_folder_says_what_to_do(tmp_path: Path, capsys: Capture) -> None:
    assert command.run(["runs", str(tmp_path)]) == EXIT_DONE
    assert "surefoot train" in capsys.readouterr().out


def test_a_missing_folder_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert command.run(["runs", str(tmp_path / "none")]) == EXIT_REQUEST
    assert "no folder of runs" in capsys.readouterr().err
