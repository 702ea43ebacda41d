"""A rank that dies or hangs, anywhere: named in time, nobody is left, nothing saved is lost."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.launches import Fault, Launch, by_command, draw_loss, train
from faults.test_signals import newest_hash, only_run
from faults.trials import rows, write_recipe
from surefoot.core.errors import EXIT_DONE, EXIT_FAILED
from surefoot.observe.run_folder import CONFIG_NAME
from surefoot.state.checkpoint import list_checkpoints

DEATH_SECONDS = 10.0
DEADLINE_SECONDS = 10.0


@dataclass
class Trials:
    """Launches of one recipe that are compared with one that nothing befell."""

    folder: Path
    recipe: str
    num_ranks: int
    output: Path
    rows: list[dict[str, object]]
    hash: str
    count: int = 0

    @classmethod
    def of(cls, folder: Path, name: str, num_ranks: int, patch: pytest.MonkeyPatch) -> Trials:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        recipe = str(write_recipe(folder, name))
        output = folder / "output.txt"
        whole = train([recipe, "--runs", str(folder / "whole")], output, None, num_ranks)
        assert whole.code == EXIT_DONE, output.read_text()
        run = only_run(folder / "whole")
        assert run is not None
        return cls(folder, recipe, num_ranks, output, rows(run), newest_hash(run))

    def befalls(
        self, fault: Fault, what: str, forked: bool = True
    ) -> tuple[Launch, str, Path | None]:
        """Launches with a fault; how it ended, what it said, its run."""
        self.count += 1
        runs = self.folder / f"trial-{self.count}"
        self.output.write_text("")
        deadline = f"parallel.deadline={DEADLINE_SECONDS:g} s"
        arguments = [self.recipe, "--runs", str(runs), "--set", deadline]
        if forked:
            ended = train(arguments, self.output, fault, self.num_ranks)
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
            resumed = train(["--resume", str(run)], self.output, None, self.num_ranks)
            assert resumed.code == EXIT_DONE, f"{what}\n{self.output.read_text()}"
            assert rows(run) == self.rows, what
            assert newest_hash(run) == self.hash, what


@pytest.mark.faults_full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("num_ranks", "few", "stated"), [(2, 1, 40), (4, 0, 20)])
def test_a_rank_that_is_killed_anywhere(
    num_ranks: int,
    few: int,
    stated: int,
    tmp_path: Path,
    num_trials: Callable[[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not num_trials(few, stated):
        pytest.skip("tried by `make faults`")
    trials = Trials.of(tmp_path, "mlp", num_ranks, monkeypatch)
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    longest, met, trial = 0.0, 0, 0
    while met < num_trials(few, stated):
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
    print(f"{num_ranks} ranks: {met} killed, over after {longest:.1f} s at most")


@pytest.mark.faults_full
@pytest.mark.timeout(3600)
def test_ranks_of_the_command_that_die_or_hang(
    tmp_path: Path, num_trials: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not num_trials(0, 6):
        pytest.skip("tried by `make faults`")
    trials = Trials.of(tmp_path, "mlp", 2, monkeypatch)
    moments, longest, met = random.SystemRandom(), {"dies": 0.0, "hangs": 0.0}, 0
    while met < num_trials(0, 6):
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
@pytest.mark.parametrize(
    ("act", "num_ranks", "few", "stated"),
    [("signal", 2, 0, 12), ("signal", 4, 0, 6), ("spin", 2, 0, 6), ("hold", 2, 0, 6)],
)
def test_a_rank_that_hangs_anywhere(
    act: str,
    num_ranks: int,
    few: int,
    stated: int,
    tmp_path: Path,
    num_trials: Callable[[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not num_trials(few, stated):
        pytest.skip("tried by `make faults`")
    trials = Trials.of(tmp_path, "mlp", num_ranks, monkeypatch)
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    longest, met, trial = 0.0, 0, 0
    while met < num_trials(few, stated):
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
            assert run is not None
            stacks = {path.name for path in (run / "artifacts").glob("stacks-rank-*.txt")}
            assert len(stacks) == num_ranks, f"{told}\n{stacks}"
        trials.goes_on(run, what)
    print(f"{act} on {num_ranks} ranks: {met} hung, over after {longest:.1f} s at most")
