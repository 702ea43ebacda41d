"""A kill inside a save loses nothing that was reported and mixes nothing, on any ranks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from faults.saves import Acknowledged, Trial, check, end, save_on, start, wait

TRIALS = [
    Trial(ranks=1),
    Trial(ranks=1, mode="async"),
    Trial(ranks=2),
    Trial(ranks=2, mode="async"),
    Trial(ranks=2, slow_rank=1),
    Trial(ranks=2, mode="async", slow_rank=0),
    Trial(ranks=4, slow_rank=2),
    Trial(ranks=4, mode="async", slow_rank=3),
]
FEW, STATED = 3, 40
LONGEST_SECONDS = 0.25


def named(trial: Trial) -> str:
    slow = f"-slow{trial.slow_rank}" if trial.slow_rank >= 0 else ""
    return f"{trial.ranks}-{trial.mode}{slow}"


def begun(folder: Path, trial: Trial) -> Acknowledged:
    """A folder with one committed checkpoint."""
    done = Acknowledged()
    save_through(folder, replace(trial, steps=1), done)
    assert done.get() == 1
    return done


def save_through(folder: Path, trial: Trial, done: Acknowledged) -> None:
    """Saves that nothing befalls; those of one rank need no process of their own."""
    if trial.ranks == 1:
        save_on(0, folder, trial, "", done)
    else:
        assert wait(start(folder, trial, done)) == [0] * trial.ranks


def from_copy(folder: Path, to: Path, reported: Acknowledged) -> Acknowledged:
    """The same elsewhere, without saving again."""
    shutil.copytree(folder, to, symlinks=True)
    done = Acknowledged()
    done.put(reported.get())
    return done


@pytest.mark.faults_full
@pytest.mark.parametrize("trial", TRIALS, ids=named)
def test_killed_at_random(
    tmp_path: Path, trial: Trial, num_trials: Callable[[int, int], int]
) -> None:
    chance = random.Random(named(trial))
    done = begun(tmp_path, trial)
    for _ in range(num_trials(FEW, STATED)):
        first = check(tmp_path, done.get()) + 1
        children = start(tmp_path, replace(trial, first_step=first), done)
        time.sleep(chance.uniform(0.0, LONGEST_SECONDS) * trial.ranks)
        one = chance.random() < 0.3 and trial.ranks > 1
        if one:
            # One rank alone dies first, as when the kernel runs out of memory.
            victim = chance.randrange(trial.ranks)
            os.kill(children[victim], signal.SIGKILL)
            time.sleep(0.05)
        end(children)
        check(tmp_path, done.get())


STEPWISE = [(Trial(), 0), (Trial(mode="async"), 0), (Trial(ranks=2), 0), (Trial(ranks=2), 1)]
CALLS = {0: 12, 1: 4}
"""Calls of a rank in one commit, at least: rank 0 also publishes."""


@pytest.mark.parametrize(("trial", "victim"), STEPWISE, ids=["1", "1-async", "2-rank0", "2-rank1"])
@pytest.mark.parametrize("again", [False, True], ids=["new", "same step again"])
def test_killed_before_every_step_of_the_commit(
    tmp_path: Path, trial: Trial, victim: int, again: bool
) -> None:
    # A step that is there already is written again after a fall-back or a roll-back.
    trial = replace(trial, steps=2, first_step=1 if again else 2, keep=1)
    before = begun(tmp_path / "begun", replace(trial, steps=1, first_step=1))
    for number in range(1, 200):
        folder = tmp_path / str(number)
        done = from_copy(tmp_path / "begun", folder, before)

        def boundary(count: int, name: str, number: int = number) -> None:
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        codes = wait(start(folder, trial, done, boundary, victim), end_survivors=True)
        newest = check(folder, done.get())
        assert newest in (1, 2, 3)
        # What is left over is cleared by the next save, which works.
        next_one = replace(trial, first_step=newest + 1, steps=1)
        save_through(folder, next_one, done)
        assert check(folder, newest + 1) == newest + 1
        assert not list(folder.glob("*.tmp"))
        shutil.rmtree(folder)
        if set(codes) == {0}:
            break
    assert number > 2 * CALLS[victim], "the protocol has more steps than were met"


@pytest.mark.parametrize("trial", [Trial(), Trial(mode="async"), Trial(ranks=2)], ids=named)
@pytest.mark.parametrize("first", [2, 1], ids=["new", "same step again"])
def test_an_error_of_the_disk_in_every_call_is_raised_and_loses_nothing(
    tmp_path: Path, trial: Trial, first: int
) -> None:
    met = 0
    before = begun(tmp_path / "begun", trial)
    for number in range(1, 200):
        folder = tmp_path / str(number)
        done = from_copy(tmp_path / "begun", folder, before)

        def boundary(count: int, name: str, number: int = number) -> None:
            if count == number:
                raise OSError(5, "Input/output error")

        # With two ranks the calls of rank 0 fail; rank 1 must hear of it.
        codes = wait(start(folder, replace(trial, first_step=first, steps=1), done, boundary))
        newest = check(folder, done.get(), resuming=False)
        assert newest in (1, 2) and len(set(codes)) == 1
        if newest == 1 and first == 2:
            assert codes[0] == 1, f"call {number} failed and nobody was told"
        shutil.rmtree(folder)
        if set(codes) == {0}:
            break
        met += 1
    assert met >= 10
