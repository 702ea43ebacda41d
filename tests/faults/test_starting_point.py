"""Which checkpoint a run goes on from: one that fits its log, or the one that is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from faults.runs_for_faults import INPUTS, TARGETS, fit
from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE, CheckpointError
from surefoot.observe.events import read_events
from surefoot.observe.metrics_log import read_rows
from surefoot.run.folder_run import RunResult
from surefoot.state.checkpoint import list_checkpoints, step_of

ANEW = ("metrics.jsonl",)


def go_on(run: Path, model: nn.Module | None = None, **more: Any) -> RunResult:
    settings = {"train": {"horizon": "12 steps"}, **more.pop("settings", {})}
    resume = more.pop("resume", run)
    made = model or nn.Linear(3, 1)
    return fit(run.parent, made, validation=(INPUTS, TARGETS), resume=resume, **settings, **more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of 9 updates with checkpoints of 3, 6 and 9, and its rows gone on with to 12."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("runs")
    nine: dict[str, Any] = {"train": {"horizon": "9 steps"}}
    done = fit(root, nn.Linear(3, 1), validation=(INPUTS, TARGETS), **nine).folder
    assert done is not None
    whole = Path(shutil.copytree(done, root / "whole"))
    go_on(whole)
    return done, rows(whole)


def rows(run: Path) -> list[dict[str, Any]]:
    return [
        {
            name: row[name]
            for name in ("row", "step", "loss", "lr", "sample_ids", "metrics")
            if name in row
        }
        for row in read_rows(run / "metrics.jsonl")
    ]


@pytest.fixture
def run(runs: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs[0], tmp_path / "run"))


@pytest.fixture
def wanted(runs: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return runs[1]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def resumes(run: Path) -> list[dict[str, Any]]:
    return [e.data for e in read_events(run / "events.jsonl") if e.kind == "resume"]


def notes(run: Path) -> str:
    return "\n".join(e.message for e in read_events(run / "events.jsonl") if e.kind == "note")


def cut_the_end(log: Path) -> int:
    log.write_bytes(log.read_bytes()[:-5])
    return 6


def spoil_row_five(log: Path) -> int:
    lines = log.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 5)
    lines[at] = b"x" * (len(lines[at]) - 1) + b"\n"
    log.write_bytes(b"".join(lines))
    return 3


def spoil_the_last_row(log: Path) -> int:
    lines = log.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 9)
    lines[at] = b'{"row":"step",' + b"x" * (len(lines[at]) - 15) + b"\n"
    log.write_bytes(b"".join(lines))
    return 6


@pytest.mark.parametrize("damage", [cut_the_end, spoil_row_five, spoil_the_last_row])
def test_where_the_newest_does_not_fit_the_log_an_older_one_is_taken(
    damage: Any, run: Path, wanted: list[dict[str, Any]]
) -> None:
    begun = damage(run / "metrics.jsonl")
    keep: dict[str, Any] = {"checkpoint": {"every": "3 steps", "keep": 1}}
    assert go_on(run, settings=keep).step == 12
    assert rows(run) == wanted, "each row once, as of the run whose log is whole"
    (resumed,) = resumes(run)
    assert resumed["checkpoint"] == f"step-{begun:08d}"
    aside = [f"step-{step:08d}" for step in (9, 6) if step > begun]
    assert sorted(resumed["put_aside"]) == sorted(aside)
    assert "step-00000009 does not fit metrics.jsonl" in notes(run) and "put aside" in notes(run)
    # They are neither counted nor deleted.
    assert {f"{name}.aside-1" for name in aside} < set(names(run))
    assert [step_of(path) for path in list_checkpoints(run / "checkpoints")] == [12]


def test_without_its_log_a_run_is_refused_before_anything_live_is_touched(
    run: Path, wanted: list[dict[str, Any]]
) -> None:
    log = run / "metrics.jsonl"
    whole = log.read_bytes()
    log.unlink()
    model = nn.Linear(3, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files = names(run)
    with pytest.raises(CheckpointError, match="no whole checkpoint fits") as caught:
        go_on(run, model)
    assert str(caught.value).count("does not fit") == 3
    assert "--accept-change metrics.jsonl" in caught.value.remedy
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert names(run) == files and not resumes(run)
    # Both ways that the remedy names are ways.
    again = Path(shutil.copytree(run, run.with_name("again")))
    log.write_bytes(whole)
    go_on(run)
    assert rows(run) == wanted
    go_on(again, accept=ANEW)
    assert rows(again) == [row for row in wanted if row["step"] > 9]
    assert resumes(again)[0]["checkpoint"] == "step-00000009"
    assert "THE METRICS LOG BEGINS ANEW" in notes(again)


def test_a_log_that_is_begun_anew_keeps_what_it_held(run: Path) -> None:
    log = run / "metrics.jsonl"
    spoil_row_five(log)
    spoiled = log.read_bytes()
    assert go_on(run, accept=ANEW).step == 12
    first, *_ = read_rows(log)
    assert first["step"] == 10 and first["samples_per_second"] is None
    assert (run / str(resumes(run)[0]["moved_rows"])).read_bytes() == spoiled
    # From here on it fits again: nothing is moved a second time.
    assert go_on(run, accept=ANEW).step == 12
    assert resumes(run)[1]["moved_rows"] is None


def test_a_run_goes_on_from_the_checkpoint_that_is_named(
    run: Path, wanted: list[dict[str, Any]]
) -> None:
    model = nn.Linear(3, 1)
    go_on(run, model, resume=run / "checkpoints" / "step-00000003")
    assert rows(run) == wanted
    assert resumes(run)[0]["put_aside"] == ["step-00000006", "step-00000009"]
    assert [step_of(path) for path in list_checkpoints(run / "checkpoints")] == [6, 9, 12]
    assert "step-00000009.aside-1" in names(run)
    # The newest is that of the new course, for a plain resume and for people.
    assert (run / "checkpoints" / "latest").read_text() == "step-00000012\n"
    loaded = surefoot.load(run / "checkpoints" / "step-00000012", model=nn.Linear(3, 1))
    assert loaded.step == 12 and torch.equal(loaded.model.weight, model.weight)  # type: ignore[arg-type]
    assert surefoot.load(run / "checkpoints" / "step-00000009", model=nn.Linear(3, 1)).step == 9


def test_a_checkpoint_that_is_named_is_taken_or_refused(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000006" / "model.safetensors").write_bytes(b"torn")
    files = names(run)
    with pytest.raises(CheckpointError, match="has 4 bytes, not"):
        go_on(run, resume=checkpoints / "step-00000006")
    with pytest.raises(CheckpointError, match="no checkpoint step-00000004") as caught:
        go_on(run, resume=checkpoints / "step-00000004")
    assert "step-00000003, step-00000006, step-00000009" in caught.value.remedy
    assert names(run) == files and not resumes(run)


def test_put_aside_again_and_again_nothing_is_overwritten(run: Path) -> None:
    for _ in range(2):
        go_on(
            run, resume=run / "checkpoints" / "step-00000003", settings={"checkpoint": {"keep": 9}}
        )
    found = [name for name in names(run) if "aside" in name]
    assert "step-00000009.aside-1" in found and "step-00000009.aside-2" in found


def test_a_log_that_goes_while_the_run_writes_it_costs_nothing(
    run: Path, wanted: list[dict[str, Any]]
) -> None:
    class Deleting(nn.Linear):
        left = 2

        def forward(self, input: Tensor) -> Tensor:
            self.left -= self.training
            if self.left == 0 and self.training:
                for name in ("metrics.jsonl", "events.jsonl"):
                    (run / name).unlink()
            return super().forward(input)

    go_on(run, Deleting(3, 1))
    assert rows(run) == wanted
    assert "metrics.jsonl WAS DELETED" in notes(run) and "events.jsonl WAS DELETED" in notes(run)
    assert go_on(run).step == 12
    assert [data["checkpoint"][-2:] for data in resumes(run)] == ["09", "12"]


RECIPE = """
name: small
model: {kind: mlp, hidden: [4]}
data: {kind: diabetes}
task: {kind: regression}
train: {horizon: 4 steps, micro_batch: 8}
checkpoint: {every: 2 steps}
evaluate: {every: never}
log: {console: "off"}
"""


def test_the_command_goes_on_from_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    assert command.invoke(["train", str(recipe), "--runs", str(tmp_path / "runs")]) == EXIT_DONE
    (run,) = (tmp_path / "runs").iterdir()
    older = run / "checkpoints" / "step-00000002"
    assert command.invoke(["train", "--resume", str(older)]) == EXIT_DONE
    assert f"surefoot runs {run.parent}" in capsys.readouterr().out
    assert resumes(run)[0]["checkpoint"] == older.name
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    assert surefoot.load(older).step == 2
