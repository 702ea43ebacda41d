"""The one order in which every run starts, seen from outside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assembly.parts import INPUTS, TARGETS, material, settings_of
from surefoot.assembly.material import Prepared
from surefoot.assembly.run_parts import Assembly
from surefoot.config.load import resolve_settings
from surefoot.core.errors import CheckpointError, ModelError, RequestError
from surefoot.observe.events import read_events
from surefoot.observe.run_folder import RunFolder
from surefoot.run.dry_run import try_once
from surefoot.run.session import RunHooks, RunRequest, start_run
from surefoot.run.start import ResumeRequest

EVENTS = ["build", "folder", "finished", "end"]


class Told:
    """What happened on the way, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def hooks(self, folder: Path) -> RunHooks:
        return RunHooks(
            on_assembled=lambda assembly: self.order.append("build"),
            on_finished=lambda result, prepared: self.order.append("finished"),
            on_end=lambda path: self.order.append("end" if path == folder else "elsewhere"),
        )


def request(
    folder: Path, told: Told, resume: bool = False, **sections: dict[str, Any]
) -> RunRequest:
    settings = settings_of(checkpoint={"every": "3 steps"}, **sections)
    resolved = resolve_settings(settings.model_dump(mode="json"))

    def prepare(resuming: bool) -> Prepared:
        assert resuming is resume
        return Prepared(material(validation=(INPUTS[:8], TARGETS[:8])))

    def make_folder(needed_bytes: int) -> RunFolder:
        assert needed_bytes > 1 << 20
        told.order.append("folder")
        return RunFolder.create_at(folder)

    return RunRequest(
        "tiny",
        resolved,
        prepare,
        make_folder,
        resume=ResumeRequest(folder, lambda run: resolved) if resume else None,
        hooks=told.hooks(folder),
    )


def test_a_new_run_is_built_before_its_folder_is_made(tmp_path: Path) -> None:
    told = Told()
    result = start_run(request(tmp_path / "run", told))
    assert (result.status, result.step) == ("finished", 6)
    assert told.order == EVENTS
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "contract.yaml", "record.json", "metrics.jsonl"} <= names
    kinds = [event.kind for event in read_events(tmp_path / "run" / "events.jsonl")]
    assert kinds[0] == "start" and kinds[-1] == "finished"


@pytest.mark.parametrize("dry", [False, True])
def test_what_is_refused_leaves_no_folder_and_nobody_hears_of_an_end(
    tmp_path: Path, dry: bool
) -> None:
    told = Told()
    asked = request(tmp_path / "run", told)
    refused = replace(asked, prepare=lambda resuming: refused_material())
    with pytest.raises(ModelError, match="evaluation mode"):
        (try_once if dry else start_run)(refused)
    assert told.order == [] and not (tmp_path / "run").exists()


def refused_material() -> Prepared:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(3, 1))
    return Prepared(material(model.eval()))


def test_a_dry_run_makes_one_update_and_leaves_no_trace(tmp_path: Path) -> None:
    told = Told()
    result = try_once(request(tmp_path / "run", told))
    assert (result.status, result.step, result.folder) == ("dry-run", 1, None)
    assert set(result.metrics) == {"train/loss", "validation/loss"}
    assert told.order == ["build"] and not list(tmp_path.iterdir())


def test_a_resume_chooses_its_checkpoint_before_it_builds(tmp_path: Path) -> None:
    told = Told()
    start_run(request(tmp_path / "run", told))
    told.order.clear()
    seen: list[int | None] = []
    asked = request(tmp_path / "run", told, resume=True, train={"horizon": "9 steps"})
    hooks = replace(asked.hooks, on_assembled=lambda a: seen.append(a.begun_for))
    result = start_run(replace(asked, hooks=hooks))
    assert result.step == 9 and seen == [6], "the parts know what the run began for"
    assert told.order == ["finished", "end"]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def test_a_resume_that_is_refused_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    told = Told()
    start_run(request(tmp_path / "run", told))
    before = snapshot(tmp_path / "run")
    other = request(tmp_path / "run", told, resume=True, train={"micro_batch": 2})
    earlier = request(tmp_path / "run", told).resolved
    with pytest.raises(RequestError, match="differs from that of the run"):
        start_run(replace(other, resume=ResumeRequest(tmp_path / "run", lambda run: earlier)))
    asked = request(tmp_path / "run", told, resume=True)

    def other_data(resuming: bool) -> Prepared:
        made = material(validation=(INPUTS[:8], TARGETS[:8]))
        return Prepared(replace(made, train=made.validation["validation"]))

    told.order.clear()
    with pytest.raises(CheckpointError, match="has changed since the checkpoint"):
        start_run(replace(asked, prepare=other_data))
    assert snapshot(tmp_path / "run") == before
    assert told.order == ["build"], "nobody hears of the end of what has not begun"
    RunFolder.open(tmp_path / "run").close()


def test_somebody_may_look_at_the_run_between_its_batches(tmp_path: Path) -> None:
    told, steps = Told(), []

    def watch(batches, settled_state):  # type: ignore[no-untyped-def]
        for batch in batches:
            yield batch
            steps.append(settled_state().progress.step)

    asked = request(tmp_path / "run", told)
    start_run(replace(asked, hooks=replace(asked.hooks, watch_batches=watch)))
    assert steps[:5] == [1, 2, 3, 4, 5]


def test_parts_of_the_run_are_given_back_when_it_fails(tmp_path: Path) -> None:
    told = Told()

    def spoil(assembly: Assembly) -> None:
        assembly.material.model.weight.data.fill_(float("nan"))  # type: ignore[operator, union-attr]

    asked = request(tmp_path / "run", told)
    with pytest.raises(Exception, match="not finite"):
        start_run(replace(asked, hooks=replace(asked.hooks, on_assembled=spoil)))
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert events[-1].kind == "failure" and told.order == ["folder", "end"]
    RunFolder.open(tmp_path / "run").close()
