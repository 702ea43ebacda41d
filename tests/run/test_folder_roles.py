"""One rank owns the run folder, the others are its guests; both answer the same questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.core.errors import RankError, RunFolderError
from surefoot.core.reports import Event
from surefoot.observe.run_folder import RunFolder
from surefoot.run.folder_roles import GuestFolder, MeasuredRun, OwnedFolder, take_folder

MEASURED = MeasuredRun(torch.device("cpu"), "fp32", 1, None)


class TwoRanks:
    """One of two ranks, which hears what the first one says."""

    size = 2

    def __init__(self, rank: int, said: dict[str, str]) -> None:
        self.rank, self.said = rank, said

    def gather(self, what: str, value: Any) -> list[Any]:
        return [self.said if self.rank else value, value]

    def channel(self, name: str) -> TwoRanks:
        return self


@pytest.fixture
def owned(tmp_path: Path):  # type: ignore[no-untyped-def]
    folder = OwnedFolder(RunFolder.create_at(tmp_path / "run"))
    yield folder
    folder.close()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_only_the_owner_writes(owned: OwnedFolder) -> None:
    before, seen = files(owned.path), []
    guest = GuestFolder(owned.path)
    guest.on_owner(lambda own: seen.append(own))
    logs = guest.open_logs(MEASURED, print, patient=False)
    assert logs.sync() == 0 and logs.observers == () and logs.resume_at(7) is None
    assert guest.keep_batch(Event("skip", 1, "", {}), [1], {}) is None
    guest.close()
    assert seen == [] and files(owned.path) == before
    owned.on_owner(lambda own: seen.append(own.path))
    assert seen == [owned.path] and owned.still_owner() and guest.still_owner()


def test_the_owner_reads_what_was_written_and_a_guest_nothing(owned: OwnedFolder) -> None:
    logs = owned.open_logs(MEASURED, print, patient=False)
    for observer in logs.observers:
        observer.on_event(Event("note", 3, "hello", {"attempt": owned.attempt}, 1.0))
    assert [event.message for event in owned.past_events()] == ["hello"]
    assert list(GuestFolder(owned.path).past_events()) == []
    for observer in logs.observers:
        observer.close()
    logs.close()


def test_a_log_that_does_not_reach_so_far_is_no_fit_and_a_missing_one_is_empty(
    owned: OwnedFolder,
) -> None:
    assert owned.metrics_at(0) == ({}, "") and owned.last_seen() == 0.0
    _, why = owned.metrics_at(10)
    assert "byte 10" in why and "metrics.jsonl" in why
    assert not (owned.path / "metrics.jsonl").exists(), "it was only read"
    row = '{"row":"eval","name":"held","metrics":{"loss":0.5}}\n'
    (owned.path / "metrics.jsonl").write_text(row)
    assert owned.metrics_at(len(row)) == ({"held/loss": 0.5}, "")
    assert GuestFolder(owned.path).metrics_at(10) == ({}, "")


def test_rank_0_takes_the_folder_and_the_others_hear_where_it_is(tmp_path: Path) -> None:
    first = take_folder(TwoRanks(0, {}), lambda: RunFolder.create_at(tmp_path / "run"))
    assert isinstance(first, OwnedFolder)
    second = take_folder(TwoRanks(1, {"path": str(first.path)}), lambda: 1 / 0)  # type: ignore
    assert isinstance(second, GuestFolder) and second.path == first.path
    first.close()


def test_where_rank_0_cannot_take_it_nobody_goes_on(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        take_folder(TwoRanks(0, {}), lambda: RunFolder.open(tmp_path / "missing"))
    with pytest.raises(RankError, match="rank 0 could not"):
        take_folder(TwoRanks(1, {}), lambda: 1 / 0)  # type: ignore
