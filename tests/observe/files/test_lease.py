"""The lease: one owner, a dead one replaced only on proof, a replaced one fenced off."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.core.errors import RunFolderError
from surefoot.observe import run_folder
from surefoot.observe.files import lock
from surefoot.observe.files.lease import HEARTBEAT_NAME, Lease, LeaseTimes, owns
from surefoot.observe.files.lock import (
    LOCK_NAME,
    Owner,
    birth_of,
    is_in_use,
    read_owner,
    this_place,
)

QUICK = LeaseTimes(beat_seconds=0.02, silent_seconds=0.3, settle_seconds=0.1)
ELSEWHERE = replace(Owner.here(), host="far", place="another boot pid:[1]", attempt="0123456789ab")


@pytest.fixture
def no_kernel_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, kind: int) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "try_lock", refuse)


@pytest.fixture
def network_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "is_on_local_disk", lambda path: False)


def leave(folder: Path, owner: Owner) -> None:
    (folder / LOCK_NAME).write_bytes(owner.as_bytes())


def test_a_process_is_known_by_its_pid_and_its_birth() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(Owner.here(), pid=process.pid, born=birth_of(process.pid))
    assert owner.is_near and not owner.has_ended
    assert replace(owner, born="1").has_ended, "the pid is in use again"
    assert not replace(owner, place="another boot").is_near
    process.kill()
    deadline = time.monotonic() + 10
    while not owner.has_ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert owner.has_ended, "a zombie has ended"
    process.communicate()
    assert owner.has_ended


def test_without_a_kernel_lock_a_living_neighbour_is_named_and_a_dead_one_replaced(
    tmp_path: Path, no_kernel_lock: None
) -> None:
    mine = Owner.here()
    leave(tmp_path, mine)
    assert is_in_use(tmp_path)
    with pytest.raises(RunFolderError, match=f"in use by process {mine.pid} on"):
        Lease(tmp_path, QUICK)
    leave(tmp_path, replace(mine, born="1"))
    assert not is_in_use(tmp_path)
    lease = Lease(tmp_path, QUICK)
    assert lease.still_owner() and lease.attempt != mine.attempt
    lease.release()


def test_an_owner_elsewhere_that_beats_is_refused(tmp_path: Path, network_disk: None) -> None:
    leave(tmp_path, ELSEWHERE)
    done = threading.Event()

    def beat() -> None:
        count = 0
        while not done.wait(0.02):
            count += 1
            (tmp_path / HEARTBEAT_NAME).write_text(str(count))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunFolderError, match="on far"):
            Lease(tmp_path, QUICK)
    finally:
        done.set()
        thread.join()
    assert read_owner(tmp_path) == ELSEWHERE


def test_an_owner_elsewhere_is_replaced_after_its_silence_was_watched(
    tmp_path: Path, network_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, ELSEWHERE)
    (tmp_path / HEARTBEAT_NAME).write_text("7")
    # What a clock on the wall says changes nothing.
    monkeypatch.setattr(time, "time", lambda: 1.0)
    told: list[str] = []
    began = time.monotonic()
    lease = Lease(tmp_path, QUICK, told.append)
    assert time.monotonic() - began >= QUICK.silent_seconds
    assert lease.still_owner() and "on far" in told[0]
    lease.release()


def test_who_resumes_a_run_is_told_why_it_waits(
    tmp_path: Path, network_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "Lease", lambda path, tell: Lease(path, QUICK, tell))
    leave(tmp_path, ELSEWHERE)
    told: list[str] = []
    with run_folder.RunFolder.open(tmp_path, tell=told.append):
        assert len(told) == 1 and "waiting 0.3 s" in told[0] and "on far" in told[0]


def test_an_owner_that_gave_the_folder_back_is_not_waited_for(
    tmp_path: Path, network_disk: None
) -> None:
    leave(tmp_path, replace(ELSEWHERE, released=True))
    told: list[str] = []
    Lease(tmp_path, QUICK, told.append).release()
    assert told == []
    owner = read_owner(tmp_path)
    assert owner is not None and owner.released and owner.pid == os.getpid()


def test_whoever_lost_the_folder_knows_it_and_falls_silent(tmp_path: Path) -> None:
    lease = Lease(tmp_path, QUICK)
    assert lease.still_owner()
    leave(tmp_path, ELSEWHERE)
    assert not lease.still_owner() and not owns(tmp_path, lease.attempt)
    lease._thread.join(10)
    assert not lease._thread.is_alive()
    lease.release()
    assert read_owner(tmp_path) == ELSEWHERE, "what is another's is not given back"


def test_the_heart_beats(tmp_path: Path) -> None:
    lease = Lease(tmp_path, QUICK)
    seen = set()
    deadline = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < deadline:
        seen.add((tmp_path / HEARTBEAT_NAME).read_text())
        time.sleep(0.005)
    lease.release()
    lease._thread.join(10)
    assert len(seen) >= 3 and all(text.startswith(lease.attempt) for text in seen)
    assert not lease._thread.is_alive()


def test_of_two_takers_without_a_kernel_lock_one_has_the_folder(
    tmp_path: Path, no_kernel_lock: None
) -> None:
    taken: list[Lease] = []
    refused: list[RunFolderError] = []
    together = threading.Barrier(2)

    def take() -> None:
        together.wait()
        try:
            taken.append(Lease(tmp_path, QUICK))
        except RunFolderError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and len(refused) == 1
    assert taken[0].still_owner()
    taken[0].release()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_writer_may_ask_but_not_give_back(tmp_path: Path) -> None:
    lease = Lease(tmp_path, QUICK)
    child = os.fork()
    if child == 0:
        try:
            good = lease.still_owner()
            lease.release()
            os._exit(0 if good and lease.still_owner() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert lease.still_owner() and is_in_use(tmp_path)
    lease.release()


def test_this_place_is_the_same_for_all_processes_here() -> None:
    program = "from surefoot.observe.files.lock import this_place; print(this_place())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert other.stdout.strip() == this_place()
