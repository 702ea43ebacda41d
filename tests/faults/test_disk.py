"""A full or failing disk: nothing older is lost, nothing half is left, and the words are clear."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.saves import pieces
from surefoot.core.errors import CheckpointError, DiskFullError, DiskRefusedError
from surefoot.parallel.ranks import OneRank
from surefoot.state import commit as commit_module
from surefoot.state.checkpoint import list_checkpoints, newest_whole
from surefoot.state.commit import SPARE_BYTES, Draft, commit
from surefoot.state.retention import Keep, Retention
from surefoot.state.saver import SaveKind, SavePolicy, Saver

STEP_BYTES = 64 * 1024
DISK_BYTES = 8 << 20
MS_RDONLY, MS_REMOUNT = 1, 32
COPIES = 8
"""How often the tensors of a trial are repeated: about 800 KiB a checkpoint."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={DISK_BYTES}".encode())
    if mounted != 0:
        pytest.skip(f"no small disk can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield place
    libc.umount2(os.fsencode(place), 2)


def draft(step: int) -> Draft:
    from dataclasses import replace

    held = [
        replace(piece, name=f"{piece.name}{copy}")
        for copy in range(COPIES)
        for piece in pieces(step, 0, 1)
    ]
    return Draft(step, held, {"step": step}, {})


def free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free


def fill_up(place: Path, leave_bytes: int) -> Path:
    filler = place / "filler"
    with filler.open("wb") as file:
        file.write(bytes(max(0, free_bytes(place) - leave_bytes)))
    return filler


@pytest.mark.parametrize("ahead", [True, False], ids=["checked before", "found while writing"])
def test_a_disk_that_is_full_at_any_point_of_a_save(
    disk: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    checkpoints = disk / "checkpoints"
    commit(checkpoints, draft(1))
    needed = sum(piece.num_bytes for piece in draft(2).pieces)
    if not ahead:
        # As where another program fills the disk after the check.
        monkeypatch.setattr(commit_module, "SPARE_BYTES", -(1 << 40))
    refused = 0
    for leave in range(0, needed + SPARE_BYTES + 2 * STEP_BYTES, STEP_BYTES):
        filler = fill_up(disk, leave)
        try:
            commit(checkpoints, draft(2))
        except DiskFullError as error:
            refused += 1
            assert "step 2" in error.what and str(checkpoints) in error.where
            assert ("bytes" in error.what) if ahead else ("No space left" in error.what)
            assert [path.name for path in list_checkpoints(checkpoints)] == ["step-00000001"]
            assert {path.name for path in checkpoints.iterdir()} == {"step-00000001", "latest"}
            assert newest_whole(checkpoints)[1].step == 1
        else:
            assert newest_whole(checkpoints)[1].step == 2
            shutil.rmtree(checkpoints / "step-00000002")
            (checkpoints / "latest").write_text("step-00000001\n")
        filler.unlink()
    least = needed // STEP_BYTES
    assert refused >= (least + SPARE_BYTES // STEP_BYTES if ahead else least)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_by_policy_the_run_goes_on_and_saves_again_when_there_is_room(
    disk: Path, mode: str
) -> None:
    checkpoints = disk / "checkpoints"
    heard: list[tuple[str, str]] = []
    saver = Saver(
        checkpoints,
        SavePolicy(mode, "continue"),  # type: ignore[arg-type]
        Retention(checkpoints, Keep()),
        OneRank(),
        lambda kind, message, data: heard.append((kind, message)),
    )
    assert saver.save(draft(1)) and saver.finish()
    filler = fill_up(disk, STEP_BYTES)
    saver.save(draft(2))
    assert not saver.finish() if mode == "async" else True
    filler.unlink()
    assert saver.save(draft(3)) and saver.finish()
    assert [kind for kind, _ in heard] == ["save", "save-paused", "save"]
    words = heard[1][1]
    assert "NO CHECKPOINT at step 2" in words and "free" in words and str(checkpoints) in words
    fill_up(disk, STEP_BYTES)
    with pytest.raises(DiskFullError):
        saver.save(draft(4), SaveKind.FINAL)
    assert newest_whole(checkpoints)[1].step == 3


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, draft(1))

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    # A plain chmod would not stop the superuser.
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        commit(tmp_path, draft(2))
    assert not isinstance(caught.value, DiskFullError) and str(tmp_path) in caught.value.where
    assert newest_whole(tmp_path)[1].step == 1


def test_a_disk_that_became_read_only(disk: Path) -> None:
    checkpoints = disk / "checkpoints"
    commit(checkpoints, draft(1))
    remount(disk, MS_REMOUNT | MS_RDONLY)
    try:
        with pytest.raises(DiskRefusedError, match="Read-only file system") as caught:
            commit(checkpoints, draft(2))
        assert not isinstance(caught.value, DiskFullError)
        assert newest_whole(checkpoints)[1].step == 1
    finally:
        remount(disk, MS_REMOUNT)
    commit(checkpoints, draft(2))
    assert newest_whole(checkpoints)[1].step == 2
    assert not list(checkpoints.glob("*.tmp"))


def remount(place: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={DISK_BYTES}".encode()
    assert libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", flags, options) == 0


def failing_at(number: int) -> Callable[[Path, str], object]:
    """`Path.open` whose n-th write of a file opened for writing fails."""
    real, count = Path.open, 0

    def opened(path: Path, *args: object, **kwargs: object) -> object:
        file = real(path, *args, **kwargs)  # type: ignore[call-overload]
        if "x" not in str(args[:1]):
            return file
        write = file.write

        class Failing:
            def write(self, data: memoryview) -> int:
                nonlocal count
                count += 1
                if count == number:
                    raise OSError(5, "Input/output error")
                return int(write(data))

            def __enter__(self) -> Failing:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

        return Failing()

    return opened


def test_an_error_in_every_single_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, draft(1))
    for number in range(1, 1000):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", failing_at(number))
            try:
                commit(tmp_path, draft(2))
            except CheckpointError as error:
                assert "Input/output error" in error.what
                assert {p.name for p in tmp_path.iterdir()} == {"step-00000001", "latest"}
            else:
                break
    assert number > len(draft(2).pieces)
    assert newest_whole(tmp_path)[1].step == 2
