"""Run folders: made once, owned by one process, freed by its end, and refused in words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from surefoot.core.errors import EXIT_REQUEST, RunFolderError
from surefoot.observe.files import atomic, lock
from surefoot.observe.files.atomic import atomic_write, remove_leftovers
from surefoot.observe.files.lock import is_in_use, read_owner
from surefoot.observe.run_folder import (
    RunFolder,
    check_free_space,
    check_name,
    find_run,
    format_bytes,
)

MOMENT = datetime(2026, 11, 27, 9, 14, 3)

HOLD = """
import sys
from surefoot.observe.run_folder import RunFolder
folder = RunFolder.open(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def _holder(path: Path, code: str = HOLD) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_name_holds_the_time_and_the_subfolders_are_there(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "runs", "stdlib-gpt", started=MOMENT) as folder:
        assert folder.path == tmp_path / "runs" / "2026-11-27T09-14-03_stdlib-gpt"
        assert folder.checkpoints_path.is_dir()
        assert folder.artifacts_path.is_dir()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        with RunFolder.create(tmp_path, "a", started=MOMENT) as folder:
            names.append(folder.name)
    stem = "2026-11-27T09-14-03_a"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]


def test_small_files_hold_what_the_caller_gave(tmp_path: Path) -> None:
    with RunFolder.create_at(tmp_path / "run") as folder:
        folder.write_config("seed: 7  # default\n")
        folder.write_contract({"loss": {"max": 1e-5}, "name": "größe"})
        folder.write_record({"seed": 7, "git": {"commit": None}})
        assert folder.config_path.read_text() == "seed: 7  # default\n"
        contract = yaml.safe_load(folder.contract_path.read_text("utf-8"))
        assert contract == {"loss": {"max": 1e-5}, "name": "größe"}
        assert json.loads(folder.record_path.read_text()) == {"seed": 7, "git": {"commit": None}}


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    RunFolder.create_at(tmp_path / "run").close()
    with pytest.raises(RunFolderError, match="exists already") as caught:
        RunFolder.create_at(tmp_path / "run")
    assert caught.value.exit_code == EXIT_REQUEST
    assert str(tmp_path / "run") in str(caught.value)


def test_a_missing_run_is_refused_and_a_similar_one_named(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "stdlib-gpt", started=MOMENT).close()
    with pytest.raises(RunFolderError, match="does not exist") as caught:
        RunFolder.open(tmp_path / "stdlib-gpt")
    assert "2026-11-27T09-14-03_stdlib-gpt" in caught.value.remedy


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(RunFolderError, match="not a run folder"):
        find_run(tmp_path / "photos")
    (tmp_path / "photo").write_text("")
    with pytest.raises(RunFolderError, match="is not a folder"):
        find_run(tmp_path / "photo")


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "a\n", "x" * 121, "é"])
def test_names_that_no_folder_should_have_are_refused(name: str) -> None:
    with pytest.raises(RunFolderError, match="run name"):
        check_name(name)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunFolderError):
        RunFolder.create(tmp_path / "runs", "a")
    with pytest.raises(RunFolderError):
        RunFolder.create_at(tmp_path / "runs" / "a")


def test_too_little_space_says_needed_and_free_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    root = tmp_path / "not" / "yet"
    with pytest.raises(RunFolderError, match=r"8\.0 GiB needed, 3\.0 GiB free"):
        RunFolder.create(root, "a", needed_bytes=8 * 2**30)
    assert list(tmp_path.iterdir()) == []
    check_free_space(root, 3 * 2**30)


def test_bytes_are_written_for_people() -> None:
    sizes = [0, 1023, 1024, 1536, 5 * 2**30, 3000 * 2**40]
    texts = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "3000.0 TiB"]
    assert [format_bytes(size) for size in sizes] == texts


def test_a_second_process_is_refused_and_the_owner_named(tmp_path: Path) -> None:
    RunFolder.create_at(tmp_path / "run").close()
    holder = _holder(tmp_path / "run")
    try:
        assert is_in_use(tmp_path / "run")
        with pytest.raises(RunFolderError, match=f"in use by process {holder.pid} on ") as caught:
            RunFolder.open(tmp_path / "run")
        assert caught.value.exit_code == EXIT_REQUEST
        with pytest.raises(RunFolderError, match="a run is using it"):
            RunFolder.create_at(tmp_path / "run")
    finally:
        _end(holder)


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    RunFolder.create_at(tmp_path / "run").close()
    holder = _holder(tmp_path / "run")
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    assert read_owner(tmp_path / "run") is not None
    assert not is_in_use(tmp_path / "run")
    with RunFolder.open(tmp_path / "run"):
        owner = read_owner(tmp_path / "run")
        assert owner is not None
        assert owner.pid == os.getpid()


FORKING = """
import os, sys, time
from surefoot.observe.run_folder import RunFolder
folder = RunFolder.open(sys.argv[1])
child = os.fork()
if child == 0:
    os.close(0); os.close(1)
    time.sleep(60)
    os._exit(0)
folder.write_record({"child": child})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_surviving_data_worker_does_not_hold_the_folder(tmp_path: Path) -> None:
    RunFolder.create_at(tmp_path / "run").close()
    holder = _holder(tmp_path / "run", FORKING)
    assert is_in_use(tmp_path / "run")  # The child closing its copy leaves the parent's lock.
    child = json.loads((tmp_path / "run" / "record.json").read_text())["child"]
    try:
        _end(holder)
        os.kill(child, 0)  # It lives.
        RunFolder.open(tmp_path / "run").close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_probe_at_the_wrong_moment_does_not_refuse_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lock.try_lock
    refusals = [1, 2]

    def busy_at_first(descriptor: int, kind: int) -> bool:
        return real(descriptor, kind) if not refusals else refusals.pop() == 0

    monkeypatch.setattr(lock, "try_lock", busy_at_first)
    with RunFolder.create_at(tmp_path / "run"):
        assert refusals == []


def test_closing_frees_the_folder_and_may_be_repeated(tmp_path: Path) -> None:
    folder = RunFolder.create_at(tmp_path / "run")
    assert is_in_use(folder.path)
    folder.close()
    folder.close()
    assert not is_in_use(folder.path)


def test_an_atomic_write_that_fails_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    atomic_write(path, "old")

    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "write_all", refuse)
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["record.json"]


def test_an_atomic_write_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(descriptor: int) -> None:
        calls.append("fsync folder" if os.path.isdir(f"/dev/fd/{descriptor}") else "fsync file")
        fsync(descriptor)

    def traced_replace(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    atomic_write(tmp_path / "a", b"\x00\xff")
    assert calls == ["fsync file", "rename", "fsync folder"]
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"


def test_a_resume_removes_the_temporaries_of_killed_writers_only(tmp_path: Path) -> None:
    RunFolder.create_at(tmp_path / "run").close()
    leftover = tmp_path / "run" / ".config.yaml.tmp-123"
    leftover.write_text("half")
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    RunFolder.open(tmp_path / "run").close()
    assert not leftover.exists()
    assert (tmp_path / "run" / "config.yaml").exists()
    assert remove_leftovers(tmp_path / "run") == []
