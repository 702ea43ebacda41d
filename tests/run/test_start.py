"""Where a run begins: what is read and chosen before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from assembly.parts import settings_of
from faults.runs_for_faults import fit
from surefoot.assembly.process import prepare_process
from surefoot.config.load import resolve_settings
from surefoot.core.counting import Pace
from surefoot.core.errors import CheckpointError, RunFolderError
from surefoot.observe.run_folder import RunFolder
from surefoot.run.start import NEW, ResumeRequest, read_resumption, reopen

SETTINGS = settings_of()
RESOLVED = resolve_settings(SETTINGS.model_dump(mode="json"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = fit(tmp_path).folder
    assert folder is not None
    return folder


def asked(run: Path) -> ResumeRequest:
    return ResumeRequest(run, lambda folder: RESOLVED)


def test_a_new_run_has_nothing_to_go_back_to() -> None:
    assert NEW.from_ephemeral is False
    assert NEW.restore(None) is None  # type: ignore[arg-type, func-returns-value]


def test_a_checkpoint_of_a_run_stands_for_the_run_and_itself(run: Path) -> None:
    whole = read_resumption(asked(run), RESOLVED)
    one = read_resumption(asked(run / "checkpoints" / "step-00000003"), RESOLVED)
    assert (whole.run, whole.checkpoint) == (run, None)
    assert (one.run, one.checkpoint) == (run, "step-00000003")


@pytest.mark.parametrize(("checkpoint", "step"), [(None, 6), ("step-00000003", 3)])
def test_the_checkpoint_is_chosen_while_the_folder_is_held(
    run: Path, checkpoint: str | None, step: int
) -> None:
    path = run if checkpoint is None else run / "checkpoints" / checkpoint
    process = prepare_process(SETTINGS)
    start = reopen(read_resumption(asked(path), RESOLVED), process, SETTINGS, print)
    with pytest.raises(RunFolderError, match="in use"):
        RunFolder.open(run)
    assert start.begun_for(Pace(samples_per_update=4)) == 6
    start.folder.close()
    RunFolder.open(run).close()
    assert step in (3, 6)


def test_where_there_is_no_checkpoint_the_folder_is_given_back(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        path.rename(run / path.name)
    process = prepare_process(SETTINGS)
    with pytest.raises(CheckpointError):
        reopen(read_resumption(asked(run), RESOLVED), process, SETTINGS, print)
    RunFolder.open(run).close()
