"""A resume goes on, ends at once, or is refused with words; it changes nothing in silence."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from faults.runs_for_faults import INPUTS, TARGETS, edit_json, fit
from surefoot.build import run_recipe
from surefoot.cli import main as command
from surefoot.config.load import load_recipe
from surefoot.core.errors import (
    EXIT_DONE,
    EXIT_REQUEST,
    CheckpointError,
    RequestError,
    RunFolderError,
)
from surefoot.observe.run_folder import RunFolder, config_of, find_begun_run
from surefoot.state.manifest import MANIFEST_NAME, read_manifest
from surefoot.state.weights import start_from

DIVERGING = {"optimizer": {"kind": "sgd", "lr": 50.0}, "evaluate": {"every": "1 steps"}}


def test_a_name_to_accept_that_is_no_field_is_refused(tmp_path: Path) -> None:
    folder = fit(tmp_path).folder
    with pytest.raises(RequestError, match=r"no field 'optimizer\.lrr'") as caught:
        fit(tmp_path, resume=folder, accept=("optimizer.lrr",))
    assert "optimizer.lr?" in caught.value.remedy
    sections = ("optimizer", "optimizer.lr", "data", "train.micro_batch")
    assert fit(tmp_path, resume=folder, accept=sections).step == 6


def test_a_run_that_early_stopping_has_ended_does_not_train_on(tmp_path: Path) -> None:
    def run(resume: Path | None = None, patience: int = 1, accept: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
        torch.manual_seed(1)
        return fit(
            tmp_path,
            nn.Linear(3, 1),
            validation=(INPUTS, TARGETS),
            train={"horizon": "20 steps"},
            early_stopping={"kind": "on", "patience": patience},
            resume=resume,
            accept=accept,
            **DIVERGING,
        )

    first = run()
    assert first.step < 20 and first.reason.startswith("early stopping")
    again = run(first.folder)
    assert (again.step, again.status, again.reason) == (first.step, "finished", first.reason)
    more = run(first.folder, patience=9, accept=("early_stopping.patience",))
    assert more.step > first.step


def test_a_checkpoint_of_another_number_type_is_of_another_model(tmp_path: Path) -> None:
    wide = (INPUTS.double(), TARGETS.double())
    folder = fit(tmp_path, nn.Linear(3, 1).double(), wide, precision={"dtype": "fp32"}).folder
    with pytest.raises(CheckpointError, match="another model") as caught:
        fit(tmp_path, resume=folder, accept=("data", "precision"))
    assert "weight: checkpoint float64, model float32" in caught.value.where


def test_a_run_cut_off_before_it_began_says_so(tmp_path: Path) -> None:
    path = RunFolder.create(tmp_path, "husk").path
    for look in (config_of, find_begun_run):
        with pytest.raises(RunFolderError, match="ended before it began"):
            look(path)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fit(tmp_path_factory.mktemp("runs")).folder
    assert folder is not None
    return folder


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    """A copy of a run of 6 updates with checkpoints of 3 and 6, to be damaged."""
    return Path(shutil.copytree(done, tmp_path / "run"))


def test_a_run_whose_configuration_is_lost_is_not_said_to_be_empty(run: Path) -> None:
    (run / "config.yaml").unlink()
    with pytest.raises(RunFolderError, match="2 checkpoints of it remain") as caught:
        fit(run.parent, resume=run)
    assert "deleted" not in str(caught.value) and "export" in caught.value.remedy
    # What the remedy names is so.
    assert (
        command.invoke(["checkpoint", "export", str(run), "--out", str(run / "out")]) == EXIT_DONE
    )
    start_from(nn.Linear(3, 1), run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RunFolderError, match="rows of its metrics remain"):
        find_begun_run(run)


def test_a_configuration_that_is_no_text_is_refused_by_its_name(run: Path) -> None:
    for content, said in [(b"\xff\xfe", "it is not UTF-8 text"), (b" \n", "it is empty")]:
        (run / "config.yaml").write_bytes(content)
        with pytest.raises(RunFolderError, match=said) as caught:
            fit(run.parent, resume=run)
        assert caught.value.where == str(run / "config.yaml")
        assert command.invoke(["train", "--resume", str(run)]) == EXIT_REQUEST


def test_folders_that_a_copy_has_lost_are_made_again(run: Path) -> None:
    shutil.rmtree(run / "artifacts")
    assert fit(run.parent, resume=run, train={"horizon": "7 steps"}).step == 7
    assert (run / "artifacts").is_dir()
    shutil.rmtree(run / "artifacts")
    (run / "artifacts").write_text("")
    with pytest.raises(RunFolderError, match="File exists"):
        RunFolder.open(run)
    (run / "artifacts").unlink()
    RunFolder.open(run).close()


def test_own_code_that_changes_the_working_directory_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    class Changing(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return len(INPUTS)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            os.chdir(elsewhere)
            return INPUTS[index], TARGETS[index]

    monkeypatch.chdir(tmp_path)
    first = fit(Path("runs"), data=Changing()).folder
    assert first is not None and first.is_absolute()
    monkeypatch.chdir(tmp_path)
    relative = first.relative_to(tmp_path)
    longer: dict[str, Any] = {"train": {"horizon": "9 steps"}}
    assert fit(Path("runs"), data=Changing(), resume=relative, **longer).step == 9
    assert list(elsewhere.iterdir()) == []


def test_a_folder_that_cannot_be_furnished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("surefoot.observe.run_folder.fsync_directory", full)
    with pytest.raises(RunFolderError, match="No space left"):
        RunFolder.create(tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["write_config", "write_contract", "write_record"])
def test_a_disk_that_fills_up_before_the_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*args: object, **named: object) -> None:
        raise OSError(28, "No space left on device", "a-file")

    monkeypatch.setattr(RunFolder, name, full)
    with pytest.raises(RunFolderError, match="cannot be written: No space left") as caught:
        fit(tmp_path)
    assert caught.value.where == "a-file"


def test_a_resume_without_space_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fit(tmp_path).folder
    assert folder is not None
    before = (folder / "events.jsonl").read_bytes()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Disk", (), {"free": 10}))
    with pytest.raises(RunFolderError, match="Too little free space"):
        fit(tmp_path, resume=folder, train={"horizon": "9 steps"})
    assert (folder / "events.jsonl").read_bytes() == before


def test_a_run_leaves_no_ephemeral_checkpoint_as_its_last(tmp_path: Path) -> None:
    sections = {
        "train": {"horizon": "2 steps"},
        "checkpoint": {"every": "9 steps", "ephemeral_every": "1 steps"},
    }
    run = fit(tmp_path, **sections).folder
    assert run is not None
    last = run / "checkpoints" / "step-00000002"
    assert read_manifest(last).about["ephemeral"] is False
    # As if it had been killed before the last save.
    edit_json(last / MANIFEST_NAME, lambda raw: raw["about"].update(ephemeral=True))
    attempts = []
    for _ in range(2):
        attempts.append(read_manifest(last).about["attempt"])
        fit(tmp_path, resume=run, **sections)
        assert read_manifest(last).about["ephemeral"] is False
    assert attempts[0] != attempts[1] == read_manifest(last).about["attempt"]


RECIPE = """
name: warm
model: {kind: mlp, hidden: [4], initial_weights: %s}
data: {kind: diabetes}
task: {kind: regression}
train: {horizon: 2 steps, micro_batch: 8}
log: {console: "off"}
"""


def test_a_resume_does_not_need_the_weights_that_the_run_began_with(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % "none")
    first = run_recipe(load_recipe(str(recipe), []), run_root=tmp_path / "runs")
    assert first.folder is not None
    start = first.folder.rename(tmp_path / "start")
    recipe.write_text(RECIPE % start)
    warm = run_recipe(load_recipe(str(recipe), []), run_root=tmp_path / "runs")
    start.rename(tmp_path / "gone")
    longer = load_recipe(str(recipe), ["train.horizon=3 steps"])
    resumed = run_recipe(longer, resume=warm.folder, accept_changes=["train.horizon"])
    assert resumed.step == 3
