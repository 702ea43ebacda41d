"""Whoever ended a launch is named, in whatever order the others leave for want of it."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from surefoot.cli import failure as screen
from surefoot.cli.session import Session
from surefoot.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, StopRequested
from surefoot.parallel import join
from surefoot.parallel import launch as module
from surefoot.parallel.launch import LAUNCHER, launch, who_ended_it
from surefoot.parallel.lookout import RankHeartbeat, sign_key
from surefoot.parallel.lost import Failure, How, claim, first_failure, of_attempt

KILLED = -signal.SIGKILL
TOLD = -signal.SIGTERM


@pytest.mark.parametrize(
    ("first", "last", "said", "found"),
    [
        # The others leave with a code of their own, for want of a rank that was killed.
        ({0: 3, 2: KILLED}, {0: 3, 2: KILLED, 1: 3}, None, (2, KILLED)),
        ({0: 3, 2: KILLED}, {0: 3, 2: KILLED}, Failure(2, How.GONE, 1), (2, KILLED)),
        # One that is told to leave says that it stops.
        ({1: KILLED}, {1: KILLED, 0: 75}, Failure(0, How.FAILED, 0), (1, KILLED)),
        ({0: 1}, {0: 1, 1: 75}, Failure(1, How.FAILED, 1), (0, 1)),
        # One that failed first is slow to leave, or is ended meanwhile.
        ({0: 3}, {0: 3, 1: 2}, Failure(1, How.FAILED, 1), (1, 2)),
        ({0: 3}, {0: 3, 1: TOLD}, Failure(1, How.FAILED, 1), (0, 3)),
        ({0: 3}, {0: 3, 1: KILLED}, Failure(1, How.FAILED, 1), (0, 3)),
        # Asked to stop.
        ({0: 75}, {0: 75, 1: TOLD}, None, (0, 75)),
        ({0: 0, 1: 75}, {1: 75}, Failure(1, How.FAILED, 1), (1, 75)),
        # A process that is gone although it ended well.
        ({0: 3, 1: 0}, {0: 3}, Failure(1, How.GONE, 0), (0, 3)),
    ],
)
def test_the_rank_and_the_code_that_count(
    first: dict[int, int], last: dict[int, int], said: Failure | None, found: tuple[int, int]
) -> None:
    assert who_ended_it(first, last, said) == found


RANK = """
import os, pathlib, signal, sys, time

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def is_told(leaves):
    signal.signal(signal.SIGTERM, lambda *_: leaves())
    pathlib.Path("hears").touch()
    time.sleep(60)

def after(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

def is_last(leaves):
    # A process that has ended is a zombie until the launcher looks.
    after("pid")
    pid = pathlib.Path("pid").read_text()
    while pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    leaves()

def writes_pid():
    pathlib.Path("new").write_text(str(os.getpid()))
    os.rename("new", "pid")
"""


def of_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, deadline: float = 10.0
) -> module.Launched:
    """Launches two ranks that do this, without a library of ours."""
    branches = f"if os.environ['RANK'] == '0':\n    {first}\nelse:\n    {second}\n"
    (folder / "does_this.py").write_text(RANK + branches, encoding="utf-8")
    monkeypatch.chdir(folder)
    return launch(["does_this"], 2, deadline)


def test_one_that_is_told_to_leave_hides_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = f"is_told(lambda: os._exit({EXIT_STOPPED}))"
    ended = of_ranks(tmp_path, monkeypatch, stops, "after('hears'); dies()")
    assert (ended.rank, ended.killed_by) == (1, signal.SIGKILL)
    # The launcher said so, before the other was told.
    assert ended.failure == Failure(1, How.GONE, LAUNCHER)


def test_one_that_leaves_for_want_of_another_hides_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The launcher finds both ended at one look.
    monkeypatch.setattr(module, "TICK_SECONDS", 0.5)
    leaves = f"is_last(lambda: os._exit({EXIT_FAILED}))"
    ended = of_ranks(tmp_path, monkeypatch, leaves, "time.sleep(0.2); writes_pid(); dies()")
    assert (ended.rank, ended.killed_by) == (1, signal.SIGKILL)


def test_one_that_ends_with_a_code_and_was_no_rank_yet_has_spoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = f"is_told(lambda: os._exit({EXIT_STOPPED}))"
    ended = of_ranks(tmp_path, monkeypatch, stops, "after('hears'); sys.exit(2)")
    assert (ended.exit_code, ended.rank) == (2, 1)
    assert ended.failure == Failure(1, How.FAILED, LAUNCHER)


def test_ranks_that_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_ranks(tmp_path, monkeypatch, "pass", "time.sleep(0.3)").exit_code == EXIT_DONE


def present_in_a_rank(port: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Shows that a rank is told to leave, which has not met the others; its exit code."""
    told = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    session = Session()
    session.is_rank = True
    return screen.present(StopRequested("stopped by SIGTERM outside of training"), session)


@pytest.mark.parametrize("is_lost", [True, False])
def test_who_is_told_to_leave_for_want_of_another_is_silent_about_it(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if is_lost:
        claim(of_attempt(store), Failure(1, How.GONE, LAUNCHER))
    assert present_in_a_rank(store.port, monkeypatch) == EXIT_STOPPED
    assert capsys.readouterr().err.count("error: ") == (0 if is_lost else 1)


def test_a_rank_that_cannot_ask_whether_it_failed_first_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_gone(*where: object) -> dist.Store:
        raise dist.DistNetworkError("nobody listens")

    monkeypatch.setattr(join, "launchers_store", is_gone)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of torchrun")
    assert present_in_a_rank(1, monkeypatch) == EXIT_STOPPED
    assert capsys.readouterr().err.count("error: ") == 1


def test_the_launcher_wakes_up_a_stopped_rank_after_the_others_have_written_their_stacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(module, "ask_for_stacks", lambda store, rank: asked.append(rank))
    launched = module._Launch(["nothing"], 2, str(tmp_path), 0.0)
    store = launched._agent.store = dist.HashStore()
    here = replace(RankHeartbeat.here(), listens=True)

    def look(**signs: RankHeartbeat) -> None:
        for rank, sign in enumerate(signs.values()):
            store.set(sign_key(rank), json.dumps(asdict(sign)))
        launched._look(1.0)
        assert launched._hangs is not None
        launched._ask_for_stacks(*launched._hangs, launched._hangs[1])

    launched._silence.longest({1: here}, 0.0)
    look(first=here, second=here)
    hangs = first_failure(store)
    assert hangs is not None and (hangs.rank, hangs.how) == (1, How.HANGS)
    assert asked == [] and launched._asked_for_stacks is None
    look(first=replace(here, stacks=True), second=here)
    assert asked == [1] and launched._asked_for_stacks is not None


def test_a_rank_that_is_stopped_before_it_has_joined_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = f"is_told(lambda: os._exit({EXIT_STOPPED}))"
    monkeypatch.setattr(module, "MAX_EXIT_AFTER_HANG_SECONDS", 0.1)
    stopped = "os.kill(os.getpid(), signal.SIGSTOP)"
    ended = of_ranks(tmp_path, monkeypatch, stops, stopped, deadline=0.5)
    assert ended.failure is not None and ended.failure.rank == 1
    assert ended.failure.what.startswith("rank 1 hangs: its process has been stopped")
