"""Launches from the command: one screen, one folder, one error, one exit code, nobody left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from surefoot.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_FOUND, EXIT_REQUEST, EXIT_STOPPED
from surefoot.observe.events import read_events
from surefoot.observe.metrics_log import read_rows

MODULE = """
import os, signal, time
import torch

class Points(torch.utils.data.Dataset):
    def __init__(self, fault="none", seconds=0.0):
        self.fault, self.seconds, self.read = fault, seconds, 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.read += 1
        if self.read > 90:
            time.sleep(self.seconds)
        if self.read > 90 and os.environ["RANK"] == "1":
            if self.fault == "slow":
                time.sleep(0.02)
            if self.fault == "raises":
                raise ValueError("this sample is rotten")
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(3, generator=generator)
        return inputs, inputs.sum().reshape(1)
"""
RECIPE = """
name: small
model: {kind: mlp, in_features: 3, hidden: [8], out_features: 1}
data: {kind: custom, target: "points:Points", arguments: {fault: FAULT, seconds: SECONDS}}
task: {kind: regression}
train: {horizon: 12 steps, micro_batch: 2, accumulation: 2}
schedule: {kind: constant}
device: cpu
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "points.py").write_text(MODULE, encoding="utf-8")
    return tmp_path


def write_recipe(folder: Path, fault: str = "none", seconds: float = 0.0) -> None:
    text = RECIPE.replace("FAULT", fault).replace("SECONDS", str(seconds))
    (folder / "small.yaml").write_text(text, encoding="utf-8")


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "surefoot", "train", "small.yaml", *more]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(arguments), cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def rows(folder: Path) -> list[dict[str, object]]:
    (found,) = (folder / "runs").iterdir()
    return [dict(row) for row in read_rows(found / "metrics.jsonl") if row["row"] == "step"]


def test_the_rank_that_failed_first_is_heard_alone(here: Path) -> None:
    write_recipe(here, "raises")
    ended = run(here, *command("--nproc", "2"))
    assert ended.returncode == EXIT_FAILED
    assert ended.stderr.count("failed first") == 1 and "rank 1 failed first" in ended.stderr
    assert ended.stderr.count("this sample is rotten") >= 1
    assert ended.stderr.count("error: ") == 1, ended.stderr
    assert "Connection closed" not in ended.stderr


@pytest.mark.ranks_full
def test_a_killed_rank_is_named_and_nobody_stays(here: Path) -> None:
    write_recipe(here, "killed")
    ended = run(here, *command("--nproc", "2"))
    assert ended.returncode == EXIT_FAILED
    assert "rank 1 was ended by SIGKILL" in ended.stderr
    assert not ranks_in(here)


def ranks_in(folder: Path) -> list[int]:
    """Processes whose working directory is that of the test."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_two_ranks_speak_once_into_one_folder_and_a_stop_saves_on_both(here: Path) -> None:
    write_recipe(here, seconds=0.02)
    longer = command("--nproc", "2", "--set", "train.horizon=60 steps")
    pipe = subprocess.PIPE
    launched = subprocess.Popen(longer, cwd=here, stdout=pipe, stderr=pipe, text=True)
    wait_for_rows(here, 2)
    launched.send_signal(signal.SIGTERM)
    _, errors = launched.communicate(timeout=120)
    assert launched.returncode == EXIT_STOPPED, errors
    last = rows(here)[-1]
    assert 2 <= int(str(last["step"])) < 60
    (folder,) = (here / "runs").iterdir()
    ended = run(here, *longer, "--resume", str(folder), "--json", "answer.json")
    assert ended.returncode == EXIT_DONE, ended.stderr
    told = ended.stdout + ended.stderr
    assert told.count("finished at step 60: the horizon is reached\n") == 2  # Log and end.
    assert told.count("save at step 60") == 1 and "Warning" not in told
    assert json.loads((here / "answer.json").read_text())["step"] == 60
    found = rows(here)
    assert [row["step"] for row in found] == list(range(1, 61))
    # 22 samples an epoch (2 are held out), 8 of both ranks an update, the third one short.
    assert [row["samples"] for row in found][:6] == [8, 16, 22, 30, 38, 44]
    manifest = json.loads((folder / "checkpoints" / "step-00000060" / "manifest.json").read_text())
    assert manifest["about"]["ranks"] == 2


def wait_for_rows(folder: Path, count: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        logs = list(folder.glob("runs/*/metrics.jsonl"))
        if logs and logs[0].read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError("no update was logged")


@pytest.mark.ranks_full
def test_a_sharded_run_has_its_page_and_keeps_to_its_budget(here: Path) -> None:
    write_recipe(here, seconds=0.05)
    sections = {
        "parallel.shard": "2",
        "train.horizon": "10_000_000 steps",
        "contract.kind": "research",
        "contract.task": "sum",
        "contract.budget.device_hours": "0.002",
    }
    sets = [word for name, value in sections.items() for word in ("--set", f"{name}={value}")]
    done = run(here, *command("--nproc", "2", *sets))
    assert done.returncode == EXIT_FOUND, done.stderr
    (folder,) = (here / "runs").iterdir()
    assert "budget" in done.stdout and "None" not in done.stdout
    assert (folder / "report.html").stat().st_size > 1000
    assert any((folder / "checkpoints").glob("step-*"))


@pytest.mark.ranks_full
def test_a_slow_rank_is_named_with_its_phase(here: Path) -> None:
    write_recipe(here, "slow")
    sets = ["--set", "train.horizon=60 steps", "--set", "guard.compare_ranks_every=30 steps"]
    done = run(here, *command("--nproc", "2", *sets))
    assert done.returncode == EXIT_DONE, done.stderr
    (folder,) = (here / "runs").iterdir()
    told = [event.message for event in read_events(folder / "events.jsonl")]
    assert any(t.startswith("rank 1 is slow") and t.endswith("data wait") for t in told)
    assert not any(t.startswith("rank 0 is slow") for t in told)


@pytest.mark.ranks_full
def test_ranks_end_with_their_launcher(here: Path) -> None:
    write_recipe(here, seconds=0.1)
    launched = subprocess.Popen(
        command("--nproc", "2"), cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_rows(here, 1)
    launched.kill()
    launched.wait()
    until = time.monotonic() + 20
    while ranks_in(here):
        assert time.monotonic() < until, "ranks were left behind"
        time.sleep(0.1)


def test_a_mesh_that_does_not_fit_is_refused_before_anything_starts(here: Path) -> None:
    write_recipe(here)
    ended = run(here, *command("--nproc", "4", "--set", "parallel.shard=3"))
    assert ended.returncode == EXIT_REQUEST
    assert "the mesh shard 3 does not make 4 ranks" in ended.stderr.replace("replicate auto x ", "")
    assert "use parallel.shard=" in ended.stderr
    assert not (here / "runs").exists()


@pytest.mark.ranks_full
def test_torchrun_starts_the_same(here: Path) -> None:
    write_recipe(here)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = run(here, *torchrun, "--nproc-per-node", "2", "-m", "surefoot", "train", "small.yaml")
    assert ended.returncode == EXIT_DONE, ended.stderr
    assert ended.stdout.count("next:") == 1
    assert len(rows(here)) == 12


def test_one_process_of_a_launcher_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.parallel.join import launched_ranks

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_ranks() == 1
    monkeypatch.setenv("RANK", "0")
    assert launched_ranks() == 4
    assert os.environ["RANK"] == "0"
