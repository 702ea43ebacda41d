"""A rank that dies or hangs, anywhere: named in time, nobody is left, nothing saved is lost."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.launches import Fault, Launch, Whole, by_command, draw_loss, train
from faults.trials import newest_hash, only_run, rows
from surefoot.core.errors import EXIT_DONE, EXIT_FAILED
from surefoot.observe.events import read_events
from surefoot.observe.run_folder import CONFIG_NAME
from surefoot.state.checkpoint import list_checkpoints

DEATH_SECONDS = 10.0
DEADLINE_SECONDS = 10.0


@dataclass
class Trials:
    """Launches that are compared with one that nothing befell."""

    folder: Path
    whole: Whole
    count: int = 0

    @classmethod
    def of(cls, folder: Path, name: str, num_ranks: int, two_ranks: Whole) -> Trials:
        known = (name, num_ranks) == ("mlp", 2)
        return cls(folder, two_ranks if known else Whole.of(folder, num_ranks, name))

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    def befalls(
        self, fault: Fault, what: str, forked: bool = True
    ) -> tuple[Launch, str, Path | None]:
        """Launches with a fault; how it ended, what it said, its run."""
        self.count += 1
        runs = self.folder / f"trial-{self.count}"
        self.output.write_text("")
        deadline = f"parallel.deadline={DEADLINE_SECONDS:g} s"
        arguments = [self.whole.recipe, "--runs", str(runs), "--set", deadline]
        if forked:
            ended = train(arguments, self.output, fault, self.whole.num_ranks)
        else:
            ended = by_command(runs, arguments, self.output, fault)
        said = self.output.read_text()
        assert not ended.left, f"{what}: {ended}\n{said}"
        if ended.since_fault is None:
            assert ended.code == EXIT_DONE, f"{what}: {ended}\n{said}"
        return ended, said, only_run(runs)

    def goes_on(self, run: Path | None, what: str) -> None:
        """Nothing that was saved is lost: resumed, it is the run that nothing befell."""
        if run is None or not (run / CONFIG_NAME).exists():
            return
        if list_checkpoints(run / "checkpoints"):
            self.output.write_text("")
            resumed = train(["--resume", str(run)], self.output, None, self.whole.num_ranks)
            assert resumed.code == EXIT_DONE, f"{what}\n{self.output.read_text()}"
            assert rows(run) == self.whole.rows, what
            assert newest_hash(run) == self.whole.hash, what


def has_begun(run: Path) -> bool:
    """Whether its ranks were training, or about to."""
    events = run / "events.jsonl"
    return events.exists() and any(event.kind == "start" for event in read_events(events))


@pytest.mark.faults_full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("name", "num_ranks", "stated"),
    [
        ("mlp", 2, 30),
        pytest.param("mlp", 4, 20, marks=pytest.mark.ranks_full),
        pytest.param("cnn", 2, 10, marks=pytest.mark.ranks_full),
    ],
)
def test_a_rank_that_is_killed_anywhere(
    name: str,
    num_ranks: int,
    stated: int,
    tmp_path: Path,
    two_ranks: Whole,
    num_trials: Callable[[int, int], int],
) -> None:
    trials = Trials.of(tmp_path, name, num_ranks, two_ranks)
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    longest, met, trial = 0.0, 0, 0
    while met < num_trials(1, stated):
        trial += 1
        fault = draw_loss(moments, num_ranks, "signal", signal.SIGKILL)
        what = f"seed {seed}, trial {trial}, {fault}"
        ended, said, run = trials.befalls(fault, what)
        if ended.since_fault is not None:
            met += 1
            longest = max(longest, ended.since_fault)
            told = f"{what}: {ended}\n{said}"
            assert ended.code == EXIT_FAILED, told
            assert ended.since_fault <= DEATH_SECONDS, told
            assert said.count("error: ") == 1, told
            assert f"rank {fault.target} was ended by SIGKILL" in said, told
        trials.goes_on(run, what)
    print(f"{name} on {num_ranks} ranks: {met} killed, over after {longest:.1f} s at most")


@pytest.mark.faults_full
@pytest.mark.ranks_full
@pytest.mark.timeout(3600)
def test_ranks_of_the_command_that_die_or_hang(
    tmp_path: Path, two_ranks: Whole, num_trials: Callable[[int, int], int]
) -> None:
    trials = Trials.of(tmp_path, "mlp", 2, two_ranks)
    moments, longest, met = random.SystemRandom(), {"dies": 0.0, "hangs": 0.0}, 0
    while met < num_trials(2, 6):
        kind = ["dies", "hangs"][met % 2]
        number = signal.SIGKILL if kind == "dies" else signal.SIGSTOP
        fault = Fault("rows", moments.randrange(1, 24), moments.choice("01"), number)
        ended, said, run = trials.befalls(fault, str(fault), forked=False)
        if ended.since_fault is not None:
            met += 1
            longest[kind] = max(longest[kind], ended.since_fault)
            told = f"{fault}: {ended}\n{said}"
            assert ended.code == EXIT_FAILED and said.count("error: ") == 1, told
            how = "was ended by SIGKILL" if kind == "dies" else "(hangs|did not answer)"
            assert re.search(f"rank {fault.target} {how}", said), told
            limit = DEATH_SECONDS if kind == "dies" else 2 * DEADLINE_SECONDS
            assert ended.since_fault <= limit, told
        trials.goes_on(run, str(fault))
    print(f"by the command: {met} dead or hung, over after {longest} s at most")


@pytest.mark.faults_full
@pytest.mark.timeout(7200)
@pytest.mark.ranks_full
@pytest.mark.parametrize(
    ("act", "num_ranks", "stated"),
    [("signal", 2, 12), ("signal", 4, 6), ("spin", 2, 6), ("hold", 2, 6)],
)
def test_a_rank_that_hangs_anywhere(
    act: str,
    num_ranks: int,
    stated: int,
    tmp_path: Path,
    two_ranks: Whole,
    num_trials: Callable[[int, int], int],
) -> None:
    trials = Trials.of(tmp_path, "mlp", num_ranks, two_ranks)
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    longest, met, trial = 0.0, 0, 0
    while met < num_trials(1, stated):
        trial += 1
        fault = draw_loss(moments, num_ranks, act, signal.SIGSTOP)
        what = f"seed {seed}, trial {trial}, {fault}"
        ended, said, run = trials.befalls(fault, what)
        if ended.since_fault is not None:
            met += 1
            longest = max(longest, ended.since_fault)
            told = f"{what}: {ended}\n{said}"
            assert ended.code == EXIT_FAILED, told
            assert ended.since_fault <= 2 * DEADLINE_SECONDS, told
            assert said.count("error: ") == 1, told
            assert re.search(f"rank {fault.target} (hangs|did not answer)", said), told
            if run is not None and has_begun(run):
                stacks = {path.name for path in (run / "artifacts").glob("stacks-rank-*.txt")}
                assert len(stacks) == num_ranks, f"{told}\n{stacks}"
        trials.goes_on(run, what)
    print(f"{act} on {num_ranks} ranks: {met} hung, over after {longest:.1f} s at most")
