"""`kill -9` in mid-run: the record still holds all nine things, and the page shows them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from surefoot.observe.readers.run_data import read_run
from surefoot.observe.readers.runs import RunStatus
from surefoot.report.run_page import write_page
from surefoot.state.checkpoint import list_checkpoints, read_checkpoint

RECIPE = """\
name: killed
model: {kind: mlp, hidden: [8]}
data: {kind: arrays, path: data.npz, validation_fraction: 0.25}
task: {kind: regression}
schedule: {kind: constant}
train: {horizon: 10_000_000 steps, micro_batch: 4}
evaluate: {every: 50 steps}
checkpoint: {every: 50 steps}
log: {console: "off"}
contract: {kind: research, task: guess}
"""
DATA = (
    "import numpy as n; r = n.random.default_rng(0); "
    "x, y = (r.normal(size=(64, k)).astype('float32') for k in (3, 1)); "
    "n.savez('data.npz', inputs=x, targets=y)"
)
DEADLINE_SECONDS = 120.0


def repository(folder: Path) -> str:
    """A committed recipe with its data; returns the commit."""
    (folder / "recipe.yaml").write_text(RECIPE)
    subprocess.run([sys.executable, "-c", DATA], cwd=folder, check=True)
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    told = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


def killed_run(folder: Path) -> Path:
    """A run that was killed some time after its second checkpoint."""
    command = [sys.executable, "-m", "surefoot", "train", "recipe.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    end = time.monotonic() + DEADLINE_SECONDS
    while len(list(folder.glob("runs/*/checkpoints/step-*/manifest.json"))) < 2:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    # A row waits in memory for about a second at most.
    time.sleep(1.2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (run,) = folder.glob("runs/*")
    return run


def test_all_nine_things_are_there(tmp_path: Path) -> None:
    commit = repository(tmp_path)
    path = killed_run(tmp_path)
    run = read_run(path)
    record = run.record
    assert run.problems == ()
    assert run.summary.status is RunStatus.KILLED
    # 1 configuration, each value with its origin; and the contract
    assert run.config["train"]["horizon"] == "10000000 steps"
    assert run.origins["train.micro_batch"] == "recipe.yaml:6"
    assert run.contract["task"] == "guess"
    # 2 commit
    assert record["git"]["commit"] == commit
    # 3 version of the data
    assert set(record["data"]["fingerprints"]) == {"train", "validation"}
    # 4 environment and container
    assert record["packages"]["torch"] and record["python"]["version"]
    assert record["container"]["kind"]
    # 5 hardware
    assert record["hardware"]["cpu"]["name"]
    # 6 metrics and slices
    assert run.steps.count > 100
    assert run.steps.has("loss") and run.steps.has("grad_norm")
    assert "validation/loss" in run.latest()
    # 7 artifacts of the evaluation, and the look at the data
    evaluation = json.loads((path / "artifacts" / "evaluation-validation.json").read_text())
    assert evaluation["metrics"]["loss"] == run.history("validation/loss")[-1][1]
    sheet = json.loads((path / "artifacts" / "data-sheet.json").read_text())
    assert sheet["sets"]["train"]["samples"] == 48
    # 8 checkpoints, whole
    manifest, _ = read_checkpoint(list_checkpoints(path / "checkpoints")[-1])
    assert manifest.step >= 100
    # 9 the log of what happened, up to the kill
    kinds = [event.kind for event in run.events]
    assert kinds[0] == "start" and "save" in kinds and "unreadable" not in kinds
    text = write_page(run).read_text("utf-8")
    for said in (commit, "killed", f"surefoot train --resume {path}", "recipe.yaml:6"):
        assert said in text
