"""The observers and sinks that come along: what they print and write."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from observe.samples import EVALUATION, REPORT, report
from surefoot.core.errors import RequestError
from surefoot.core.reports import Event
from surefoot.observe.csv_sink import CsvSink
from surefoot.observe.heartbeat import Heartbeat
from surefoot.observe.observers import Observers
from surefoot.observe.stopwatch import Stopwatch


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_heartbeat_is_one_line_in_so_many_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    heart = Heartbeat(every_seconds=10)
    for window in range(1, 31):
        heart.on_step(report(window, time=float(window)))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 1", "step 11", "step 21"]
    assert lines[1].endswith("1 updates/s")


def test_a_heartbeat_tells_evaluations_and_events(capsys: pytest.CaptureFixture[str]) -> None:
    heart = Heartbeat()
    heart.on_eval(EVALUATION)
    heart.on_event(Event("save", 7, "saved"))
    assert capsys.readouterr().err == "step 3, validation: loss 2.4\nstep 7, save: saved\n"
    with pytest.raises(RequestError, match="every_seconds is -1"):
        Heartbeat(every_seconds=-1)


def test_a_stopwatch_leaves_the_first_update_out(capsys: pytest.CaptureFixture[str]) -> None:
    watch = Stopwatch()
    for window, seconds in enumerate((9.0, 1.0, 3.0, 1.0), 1):
        watch.on_step(report(window, step_seconds=seconds, data_seconds=0.5))
    watch.close()
    assert capsys.readouterr().err == (
        "3 updates: median 1000 ms, 95 % within 3000 ms, slowest 3000 ms in window 3; "
        "30.0% of the time waiting for data\n"
    )


def test_a_csv_file_holds_the_same_floats(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path)
    observers = Observers([], [sink])
    observers.on_step(REPORT)
    observers.on_eval(EVALUATION)
    observers.close()
    (row,) = read(tmp_path / "updates.csv")
    assert float(row["grad_norm"]) == REPORT.grad_norm
    assert (row["window"], row["term/ce"], row["lr/decay"]) == ("4", "2.0", "0.0003")
    (evaluation,) = read(tmp_path / "evaluations.csv")
    assert evaluation == {
        "step": "3", "set": "validation", "weights": "raw", "metric": "loss", "value": "2.4"
    }  # fmt: skip


def test_a_resumed_csv_file_holds_each_window_once(tmp_path: Path) -> None:
    first = CsvSink(tmp_path)
    for window in range(1, 8):
        first.on_step(report(window, loss=1.0))
    first.on_eval(replace(EVALUATION, step=7))
    first.close()
    with (tmp_path / "updates.csv").open("a") as file:
        file.write("8,8,1")  # A kill tore this row.
    second = CsvSink(tmp_path)
    second.on_step(report(5, loss=2.0))
    second.on_eval(replace(EVALUATION, step=7))
    second.close()
    rows = read(tmp_path / "updates.csv")
    assert [(row["window"], row["loss"]) for row in rows] == [
        *((str(window), "1.0") for window in range(1, 5)), ("5", "2.0")
    ]  # fmt: skip
    assert len(read(tmp_path / "evaluations.csv")) == 1
