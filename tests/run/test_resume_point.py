"""The checkpoint to go on from is the newest whole one that fits the log, or the one named."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.runs_for_faults import fit
from surefoot.core.errors import CheckpointError
from surefoot.observe.run_folder import RunFolder
from surefoot.parallel.ranks import OneRank
from surefoot.run.folder_roles import OwnedFolder
from surefoot.run.resume_point import Wanted, find_starting_point, put_aside
from surefoot.state.checkpoint import list_checkpoints


@pytest.fixture
def folder(tmp_path: Path):  # type: ignore[no-untyped-def]
    run = fit(tmp_path).folder
    assert run is not None
    owned = OwnedFolder(RunFolder.open(run))
    yield owned
    owned.close()


def test_the_newest_or_the_one_that_is_named(folder: OwnedFolder) -> None:
    newest = find_starting_point(folder, OneRank(), Wanted())
    assert newest.path.name == "step-00000006" and not newest.newer and not newest.log_misfit
    named = find_starting_point(folder, OneRank(), Wanted("step-00000003"))
    assert named.path.name == "step-00000003"
    assert [path.name for path in named.newer] == ["step-00000006"]
    with pytest.raises(CheckpointError, match="there is no checkpoint step-00000005"):
        find_starting_point(folder, OneRank(), Wanted("step-00000005"))


def test_a_state_is_taken_once(folder: OwnedFolder) -> None:
    point = find_starting_point(folder, OneRank(), Wanted())
    assert point.take_snapshot().values["progress"]["step"] == 6
    with pytest.raises(IndexError):
        point.take_snapshot()


def test_where_the_log_is_shorter_an_older_one_is_taken_or_the_log_begins_anew(
    folder: OwnedFolder,
) -> None:
    log = folder.path / "metrics.jsonl"
    older = find_starting_point(folder, OneRank(), Wanted("step-00000003"))
    log.write_bytes(log.read_bytes()[: older.take_snapshot().values["log_offsets"]["metrics"]])
    found = find_starting_point(folder, OneRank(), Wanted())
    assert found.path.name == "step-00000003" and len(found.refused) == 1
    anew = find_starting_point(folder, OneRank(), Wanted(may_begin_log_anew=True))
    assert anew.path.name == "step-00000006" and "does not hold a row" in anew.log_misfit


def test_what_is_put_aside_is_counted_by_nobody(folder: OwnedFolder) -> None:
    point = find_starting_point(folder, OneRank(), Wanted("step-00000003"))
    put_aside(point.newer, point.path)
    assert [path.name for path in list_checkpoints(folder.checkpoints_path)] == ["step-00000003"]
    assert any("aside" in path.name for path in folder.checkpoints_path.iterdir())
