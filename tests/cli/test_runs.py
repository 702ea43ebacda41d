"""`surefoot runs`: the table, the JSON and what it says to do next. The facts are `observe`'s."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.cli import main as command
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


def make_run(root: Path, name: str, kinds: list[str], losses: list[float]) -> Path:
    with RunFolder.create(root, name) as folder:
        folder.write_config("name: x\n")
        events = EventLog(folder.events_path)
        for kind in kinds:
            events.on_event(Event(kind, 0, f"[{kind}]", {}, 1.0))
        events.close()
        log = MetricsLog(folder.metrics_path)
        for step, loss in enumerate(losses, start=1):
            log.on_step(step_report(step, loss))
            log.on_eval(EvalReport(step, "validation", {"loss": loss / 2}, 1.0, 1))
        log.close()
        return folder.path


def test_the_table_and_what_to_do_next(tmp_path: Path, capsys: Capture) -> None:
    make_run(tmp_path, "first", ["start", "finished"], [3.0, 2.0])
    second = make_run(tmp_path, "second", ["start"], [float("nan")])
    (tmp_path / "not a run").mkdir()
    assert command.invoke(["runs", str(tmp_path)]) == EXIT_DONE
    out = capsys.readouterr().out
    header, first_row, second_row = out.splitlines()[:3]
    assert header.split() == ["run", "status", "step", "loss", "best", "verdict", "took", "last"]
    for part in ("_first", "finished", " 2 ", "loss 1 at 2", "[finished]"):
        assert part in first_row
    for part in ("_second", "killed", "nan", "[start]"):
        assert part in second_row
    assert "not a run" not in out
    assert f"surefoot train --resume {second}" in out
    assert f"surefoot checkpoint inspect {second}" in out


def test_a_finished_run_is_not_offered_for_a_resume(tmp_path: Path, capsys: Capture) -> None:
    make_run(tmp_path, "first", ["start", "finished"], [3.0])
    command.invoke(["runs", str(tmp_path)])
    assert "--resume" not in capsys.readouterr().out


def test_the_json(tmp_path: Path, capsys: Capture) -> None:
    path = make_run(tmp_path, "first", ["start", "stopped"], [float("nan")])
    assert command.invoke(["runs", str(tmp_path), "--json", "-"]) == EXIT_DONE
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert (row["path"], row["status"], row["loss"]) == (str(path), "stopped", "NaN")


def test_an_empty_folder_says_what_to_do(tmp_path: Path, capsys: Capture) -> None:
    assert command.invoke(["runs", str(tmp_path)]) == EXIT_DONE
    assert "surefoot train" in capsys.readouterr().out


def test_a_missing_folder_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert command.invoke(["runs", str(tmp_path / "none")]) == EXIT_REQUEST
    assert "does not exist" in capsys.readouterr().err
