"""An update that went wrong is looked into, and its batches are kept for a replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from assembly.parts import assembled
from surefoot.core.reports import Event
from surefoot.observe.run_folder import RunFolder
from surefoot.run.bad_windows import BadWindows
from surefoot.run.folder_roles import GuestFolder, OwnedFolder


@pytest.fixture
def folder(tmp_path: Path):  # type: ignore[no-untyped-def]
    owned = OwnedFolder(RunFolder.create_at(tmp_path / "run"))
    yield owned
    owned.close()


def looked(folder: OwnedFolder | GuestFolder, kind: str) -> dict[str, object]:
    assembly = assembled()
    trainable = assembly.trainable
    assembly.material.model.weight.data.fill_(float("nan"))  # type: ignore[operator, union-attr]
    windows = assembly.open_windows(trainable.state.progress.cursor)
    window = next(windows)
    windows.close()
    bad = BadWindows(trainable.first_bad, trainable.optimizing.guard, folder)
    event = Event(kind, 0, "", {"window": 1, "loss": 1.0, "grad_norm": 1.0})
    return bad(event, window, window.weights)


def test_the_module_is_named_and_the_evidence_lies_in_the_folder(folder: OwnedFolder) -> None:
    found = looked(folder, "non-finite")
    assert "weight" in str(found["meaning"]) and found["first_bad"]
    kept = folder.path / str(found["evidence"])
    assert kept.exists() and kept.is_relative_to(folder.artifacts_path)


def test_a_spike_is_kept_and_not_run_again(folder: OwnedFolder) -> None:
    assert set(looked(folder, "spike")) == {"evidence"}


def test_a_guest_looks_too_and_keeps_nothing(folder: OwnedFolder) -> None:
    found = looked(GuestFolder(folder.path), "non-finite")
    assert found["first_bad"] and "evidence" not in found


def test_a_disk_that_refuses_is_no_reason_to_lose_the_event(
    folder: OwnedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("surefoot.run.folder_roles.keep_batch", full)
    assert "not kept" in str(looked(folder, "non-finite")["evidence"])
