"""A data worker that dies or hangs under a training: named in time, and the training ends."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from faults.runs_for_faults import INPUTS, TARGETS, fit
from surefoot.core.errors import SurefootError
from surefoot.verify.processes import child

DEADLINE_SECONDS = 2.0
DEATH_SECONDS = 10.0
DEATHS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)


class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Takes a while for each sample, so that a fault falls into the reading."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.005)
        return INPUTS[index], TARGETS[index]


def endless(runs: str, error: str) -> None:
    """Body of a process: trains until something happens, and writes down what."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    try:
        fit(
            Path(runs),
            nn.Linear(3, 1),
            Slow(),
            train={"horizon": "100000 steps"},
            checkpoint={"every": "1000 steps"},
            loader={"workers": 2, "deadline": f"{DEADLINE_SECONDS:g} s"},
        )
    except SurefootError as caught:
        told = {"kind": type(caught).__name__, "text": str(caught), "time": time.monotonic()}
        Path(error).write_text(json.dumps(told))


@pytest.mark.faults_full
@pytest.mark.timeout(3600)
def test_a_worker_that_dies_or_hangs_is_named_in_time(
    tmp_path: Path, num_trials: Callable[[int, int], int]
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    slowest = {"death": 0.0, "hang": 0.0}
    for trial in range(num_trials(4, 40)):
        number = moments.choice([*DEATHS, signal.SIGSTOP, signal.SIGSTOP])
        kind = "hang" if number == signal.SIGSTOP else "death"
        error = tmp_path / f"error-{trial}.json"
        with child(endless, str(tmp_path / f"runs-{trial}"), str(error)) as process:
            workers = wait_for_workers(process.pid)
            process.join(moments.uniform(0.0, 0.3))
            victim = moments.choice(workers)
            os.kill(victim, number)
            struck = time.monotonic()
            process.join(120)
            assert process.exitcode is not None, f"seed {seed}: hangs after {number.name}"
        told = json.loads(error.read_text())
        seconds = told["time"] - struck
        slowest[kind] = max(slowest[kind], seconds)
        allowed = DEATH_SECONDS if kind == "death" else 2 * DEADLINE_SECONDS
        assert seconds <= allowed, f"seed {seed}: {number.name} seen after {seconds:.1f} s"
        assert f"(pid {victim})" in told["text"] and "data worker" in told["text"]
        assert told["kind"] == ("LoaderStuckError" if kind == "hang" else "DataError")
        assert not any(psutil.pid_exists(pid) for pid in workers), "a worker was left"
    print(f"slowest detection: {slowest}")


def wait_for_workers(pid: int | None) -> list[int]:
    """Process ids of both workers, once they read."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = [p.pid for p in psutil.Process(pid).children()]
        if len(found) == 2:
            time.sleep(0.3)
            return found
        time.sleep(0.01)
    raise AssertionError("no worker has started")


class Stuck(nn.Linear):
    """Its third update never ends."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += self.training
        while self.calls > 2:
            time.sleep(0.01)
        return super().forward(input)


def stuck(runs: str) -> None:
    """Body of a process that hangs."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    fit(Path(runs), Stuck(3, 1), guard={"deadline": "1 s"})


def test_a_training_that_hangs_in_the_users_code_leaves_its_stacks(tmp_path: Path) -> None:
    with child(stuck, str(tmp_path)) as process:
        until = time.monotonic() + 60
        stacks, events = "", ""
        while ("forward" not in stacks or "no progress" not in events) and time.monotonic() < until:
            time.sleep(0.05)
            for run in tmp_path.iterdir():
                stacks = read_text(run / "artifacts" / "stacks-rank-0.txt")
                events = read_text(run / "events.jsonl")
        assert process.is_alive(), "it is not ended"
    assert "test_workers_fail.py" in stacks and "in forward" in stacks
    assert "no progress for" in events and "last: an update" in events


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
