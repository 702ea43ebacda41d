"""`surefoot train`: a run, its end, its JSON, a stop on request and a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE, EXIT_REQUEST, EXIT_STOPPED

Capture = pytest.CaptureFixture[str]


def train(*words: str) -> int:
    return command.invoke(["train", *words])


def step_rows(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["row"] == "step"]


def test_a_run_leaves_its_folder_and_says_what_is_next(
    recipe: str, tmp_path: Path, capsys: Capture
) -> None:
    runs, answer = tmp_path / "runs", tmp_path / "answer.json"
    assert train(recipe, "--runs", str(runs), "--json", str(answer)) == EXIT_DONE
    (folder,) = runs.iterdir()
    facts = json.loads(answer.read_text())
    assert facts["status"] == "finished"
    assert facts["step"] == 20
    assert facts["folder"] == str(folder)
    assert facts["metrics"]["validation/loss"] > 0
    assert [row["step"] for row in step_rows(folder)] == list(range(1, 21))
    out = capsys.readouterr().out
    assert "finished at step 20" in out
    assert "validation/loss" in out
    assert f"surefoot checkpoint inspect {folder}" in out
    assert f"surefoot runs {runs}" in out


def test_a_dry_run_leaves_no_trace(recipe: str, tmp_path: Path, capsys: Capture) -> None:
    before = {path for path in tmp_path.iterdir() if path.name != "cache"}
    assert train(recipe, "--dry-run", "--runs", str(tmp_path / "runs")) == EXIT_DONE
    assert {path for path in tmp_path.iterdir() if path.name != "cache"} == before
    out = capsys.readouterr().out
    assert "train/loss" in out
    assert f"surefoot train {recipe}" in out


def test_overrides_reach_the_run(recipe: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert train(recipe, "--runs", str(runs), "--set", "train.horizon=6 steps") == EXIT_DONE
    (folder,) = runs.iterdir()
    assert len(step_rows(folder)) == 6
    assert "horizon: 6 steps  # override" in (folder / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["stdlib-gtp"], "stdlib-gpt"),
        (["--resume", "no/such/run"], "no/such/run"),
        (["--set", "optimizer.lrr=1"], "did you mean optimizer.lr?"),
        (["--set", "train.micro_batch=0"], "train.micro_batch"),
    ],
)
def test_a_wrong_request_starts_nothing(
    words: list[str], answer: str, tmp_path: Path, capsys: Capture
) -> None:
    assert train(*words, "--runs", str(tmp_path / "runs")) == EXIT_REQUEST
    err = capsys.readouterr().err
    assert answer in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_saves_and_a_resume_goes_on(recipe: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    horizon = "train.horizon=100000 steps"
    started = subprocess.Popen(
        [sys.executable, "-m", "surefoot", "train", recipe, "--runs", str(runs), "--set", horizon],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ),
    )
    try:
        wait_for_rows(runs)
        started.send_signal(signal.SIGINT)
        out, _ = started.communicate(timeout=120)
    finally:
        started.kill()
    assert started.returncode == EXIT_STOPPED, out
    (folder,) = runs.iterdir()
    assert f"surefoot train --resume {folder}" in out
    stopped_at = len(step_rows(folder))
    further = ["--set", f"train.horizon={stopped_at + 5} steps", "--accept-change", "train.horizon"]
    assert train("--resume", str(folder), *further) == EXIT_DONE
    assert [row["step"] for row in step_rows(folder)] == list(range(1, stopped_at + 6))


def wait_for_rows(runs: Path) -> None:
    """Until the first updates stand in the log; the deadline asserts only that they come."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(path.stat().st_size for path in runs.glob("*/metrics.jsonl")):
            return
        time.sleep(0.05)
    raise AssertionError("no update came")


def test_a_change_that_matters_is_refused_unless_accepted(
    recipe: str, tmp_path: Path, capsys: Capture
) -> None:
    runs = tmp_path / "runs"
    assert train(recipe, "--runs", str(runs)) == EXIT_DONE
    (folder,) = runs.iterdir()
    capsys.readouterr()
    assert train("--resume", str(folder), "--set", "optimizer.lr=0.5") == EXIT_REQUEST
    err = capsys.readouterr().err
    assert "optimizer.lr" in err
    assert "--accept-change" in err


def test_a_cooldown_can_be_decided_on_a_resume(recipe: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    stable = ["--set", "schedule.kind=wsd", "--set", "schedule.warmup=2"]
    assert train(recipe, "--runs", str(runs), *stable) == EXIT_DONE
    (folder,) = runs.iterdir()
    decided = [
        *("--set", "train.horizon=30 steps"),
        *("--set", "schedule.cooldown=10 steps"),
    ]
    assert train("--resume", str(folder), *decided) == EXIT_DONE
    rates = [row["lr"]["decay"] for row in step_rows(folder)]
    assert rates[2:20] == [0.01] * 18
    assert rates[20:] == pytest.approx([0.01 * (10 - n) / 10 for n in range(10)])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (resumed,) = [event for event in events if event["kind"] == "resume"]
    assert "schedule.cooldown" in json.dumps(resumed)
