"""A whole run on a disk that fills up under it: by policy it goes on, and loses no row."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.runs_for_faults import INPUTS, TARGETS, settings, squared_error_sum
from surefoot import Trainer
from surefoot.core.errors import EXIT_FAILED, CheckpointError, DiskFullError, DiskRefusedError
from surefoot.core.reports import Event, StepReport
from surefoot.observe import metrics_log
from surefoot.observe.events import EventKind, read_events
from surefoot.observe.metrics_log import read_rows
from surefoot.state.checkpoint import list_checkpoints, newest_whole

DISK_BYTES = 16 << 20


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


class AnotherProgram:
    """Fills the disk to the last byte once one checkpoint is saved, and frees it once some saves
    were told to have failed: so that no save is under way when the disk changes, however slow."""

    def __init__(self, place: Path, frees_after: int | None) -> None:
        self.filler = place / "filler"
        self.frees_after = frees_after
        self.refused = 0

    def on_step(self, report: StepReport) -> None: ...

    def on_eval(self, report: Any) -> None: ...

    def on_event(self, event: Event) -> None:
        if event.kind == EventKind.SAVE and not self.filler.exists() and not self.refused:
            with self.filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    return
        if event.kind == EventKind.SAVE_PAUSED:
            self.refused += 1
            if self.refused == self.frees_after:
                self.filler.unlink()

    def close(self) -> None: ...


def fit(disk: Path, other: AnotherProgram, **checkpoint: Any) -> Any:
    torch.manual_seed(0)
    trainer = Trainer(
        torch.nn.Linear(3, 1),
        (INPUTS, TARGETS),
        squared_error_sum,
        settings=settings(
            train={"horizon": "24 steps"}, checkpoint={"every": "4 steps", **checkpoint}
        ),
        runs=disk,
        observers=[other],
    )
    return trainer.fit()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_goes_on_while_its_disk_is_full(
    disk: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    # Each row is tried at once, so that the log meets the full disk too.
    monkeypatch.setattr(metrics_log, "FLUSH_SECONDS", 0.0)
    result = fit(disk, AnotherProgram(disk, 2), mode=mode, keep=10)
    assert result.status == "finished"
    steps = [row["step"] for row in read_rows(result.folder / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, 25))
    events = list(read_events(result.folder / "events.jsonl"))
    paused = [event for event in events if event.kind == "save-paused"]
    assert [event.data["checkpoint_step"] for event in paused] == [8, 12]
    for event in paused:
        assert event.data["free_bytes"] == 0 and str(result.folder) in str(event.data["folder"])
    found = list_checkpoints(result.folder / "checkpoints")
    assert [int(path.name[-2:]) for path in found] == [4, 16, 20, 24]
    assert not list((result.folder / "checkpoints").glob("*.tmp"))
    assert newest_whole(result.folder / "checkpoints")[1].step == 24


def test_by_policy_a_full_disk_ends_the_run(disk: Path) -> None:
    with pytest.raises(DiskFullError) as caught:
        fit(disk, AnotherProgram(disk, None), on_full="stop")
    assert caught.value.exit_code == EXIT_FAILED
    assert "free" in caught.value.remedy and str(disk) in caught.value.where
    (run,) = [path for path in disk.iterdir() if path.is_dir()]
    assert newest_whole(run / "checkpoints")[1].step == 4
    shutil.rmtree(run)


def test_a_run_whose_disk_stays_full_ends_with_an_error(disk: Path) -> None:
    with pytest.raises(DiskFullError, match="step 24"):
        fit(disk, AnotherProgram(disk, None))
    (run,) = [path for path in disk.iterdir() if path.is_dir()]
    assert newest_whole(run / "checkpoints")[1].step == 4


def test_what_an_fsync_of_the_log_refuses_is_not_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    class Later(AnotherProgram):
        def on_event(self, event: Event) -> None: ...

        def on_step(self, report: StepReport) -> None:
            if report.step == 3:
                monkeypatch.setattr(metrics_log.os, "fsync", refuse)

    # The rows may be gone, though a later fsync would say that all is well.
    with pytest.raises(CheckpointError, match="metrics log cannot be written") as caught:
        fit(tmp_path, Later(tmp_path, None))
    assert not isinstance(caught.value, DiskRefusedError)
