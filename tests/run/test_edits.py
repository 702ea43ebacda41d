"""What a run wrote down is what it goes on with; a hand that changed it is noticed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from surefoot.build import run_recipe
from surefoot.cli import main as command
from surefoot.config.load import load_recipe
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, CheckpointError, RequestError
from surefoot.observe.events import read_events
from surefoot.observe.run_folder import config_of

OVERRIDES = (
    "train.horizon=3 epochs",
    "checkpoint.every=10 steps",
    "checkpoint.keep=9",
    "early_stopping.kind=off",
    "log.console=off",
)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as a kill behind update 20 leaves it."""
    runs = tmp_path_factory.mktemp("runs")
    folder = run_recipe(load_recipe("diabetes-mlp", OVERRIDES), run_root=runs).folder
    assert folder is not None
    for checkpoint in (folder / "checkpoints").glob("step-000000[3-9]*"):
        shutil.rmtree(checkpoint)
    return folder


def copy_of(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "copy", symlinks=True))


def resume(run: Path, *accept: str) -> Any:
    return run_recipe(load_recipe(config_of(run)), resume=run, accept_changes=accept)


def replace_in(path: Path, pattern: str, by: str) -> None:
    text, count = re.subn(pattern, by, path.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)


def test_what_nobody_changed_is_complete_and_goes_on(honest: Path, tmp_path: Path) -> None:
    run = copy_of(honest, tmp_path)
    assert command.invoke(["checkpoint", "verify", str(run)]) == EXIT_DONE
    assert resume(run).status == "finished"
    assert command.invoke(["checkpoint", "verify", str(run)]) == EXIT_DONE


@pytest.mark.parametrize(
    ("pattern", "by", "field"),
    [
        (r"^  lr: 0.01\b", "  lr: 0.05", "optimizer.lr: 0.01 -> 0.05"),
        (r"^seed: 0\b", "seed: 1", "seed: 0 -> 1"),
        (r"^  clip_norm: 1.0\b", "  clip_norm: 9.0", "train.clip_norm: 1.0 -> 9.0"),
        (r"^  horizon: 3 epochs", "  horizon: 4 epochs", "train.horizon"),
    ],
)
def test_a_configuration_that_was_edited_is_refused_by_name(
    honest: Path, tmp_path: Path, pattern: str, by: str, field: str
) -> None:
    run = copy_of(honest, tmp_path)
    replace_in(run / "config.yaml", pattern, by)
    assert command.invoke(["checkpoint", "verify", str(run)]) == EXIT_FOUND
    with pytest.raises(RequestError, match=r"config\.yaml was changed since") as caught:
        resume(run)
    assert field in caught.value.what


def test_an_edited_configuration_may_be_accepted_and_is_another_run(
    honest: Path, tmp_path: Path
) -> None:
    run = copy_of(honest, tmp_path)
    replace_in(run / "config.yaml", r"^  lr: 0.01\b", "  lr: 0.05")
    assert resume(run, "config.yaml").status == "finished"
    event = next(event for event in read_events(run / "events.jsonl") if event.kind == "resume")
    assert event.data["tier"] == "T3"
    assert event.data["changes"] == ["optimizer.lr: 0.01 -> 0.05"]


def test_a_comment_is_no_change(honest: Path, tmp_path: Path) -> None:
    run = copy_of(honest, tmp_path)
    config = run / "config.yaml"
    config.write_text(config.read_text() + "# looked at\n")
    assert resume(run).status == "finished"


def test_a_resume_that_was_cut_off_before_it_saved_is_no_edit(honest: Path, tmp_path: Path) -> None:
    """Its configuration is newer than the newest checkpoint."""
    run = copy_of(honest, tmp_path)
    asked = load_recipe(config_of(run), ["train.clip_norm=0.5"])
    run_recipe(asked, resume=run, accept_changes=("train.clip_norm",))
    for checkpoint in (run / "checkpoints").glob("step-000000[3-9]*"):
        shutil.rmtree(checkpoint)
    assert resume(run).status == "finished"


@pytest.mark.parametrize("place", [1, 12])
def test_a_digit_of_an_old_loss_is_noticed(honest: Path, tmp_path: Path, place: int) -> None:
    run = copy_of(honest, tmp_path)
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    digit = re.search(r'"loss":\d', lines[place])
    assert digit is not None
    at = digit.end() - 1
    other = "1" if lines[place][at] != "1" else "2"
    lines[place] = lines[place][:at] + other + lines[place][at + 1 :]
    log.write_text("".join(lines))
    assert command.invoke(["checkpoint", "verify", str(run)]) == EXIT_FOUND
    if place > 10:
        # Behind the first checkpoint: an older one is taken, as for a log that does not fit.
        assert resume(run).status == "finished"
        return
    with pytest.raises(CheckpointError, match="was changed since the run wrote it"):
        resume(run)
    assert resume(run, "metrics.jsonl").status == "finished"
