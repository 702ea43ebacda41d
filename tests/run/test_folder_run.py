"""One run in its folder: what it saves, what it tells at its end, and how it goes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from faults.runs_for_faults import INPUTS, TARGETS, fit
from surefoot.observe.events import read_events
from surefoot.observe.run_folder import RunFolder
from surefoot.state.checkpoint import list_checkpoints, read_checkpoint


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in read_events(folder / "events.jsonl")]


def test_each_checkpoint_says_of_which_run_it_is_and_where_the_data_stands(tmp_path: Path) -> None:
    folder = fit(tmp_path, validation=(INPUTS, TARGETS)).folder
    assert folder is not None
    for path, position in zip(list_checkpoints(folder / "checkpoints"), (12, 4), strict=True):
        manifest, snapshot = read_checkpoint(path)
        assert manifest.about["cursor"]["position"] == position
        assert manifest.about["begun_for"] == 6 and manifest.about["data"].keys() == {
            "train",
            "validation",
        }
        rows = (folder / "metrics.jsonl").read_bytes()[: snapshot.values["log_offsets"]["metrics"]]
        assert json.loads(rows.splitlines()[-1])["step"] == manifest.step


def test_a_resume_says_where_it_goes_on_and_what_it_keeps(tmp_path: Path) -> None:
    first = fit(tmp_path).folder
    assert first is not None
    resumed = fit(tmp_path, resume=first, train={"horizon": "8 steps"})
    assert resumed.step == 8 and resumed.folder == first
    (event,) = [e for e in read_events(first / "events.jsonl") if e.kind == "resume"]
    assert event.data["checkpoint"] == "step-00000006" and event.data["tier"] == "T0"
    assert event.data["changes"] == ["train.horizon: '6 steps' -> '8 steps'"]


def test_a_failure_is_the_last_event_and_the_folder_is_free(tmp_path: Path) -> None:
    class Breaks(nn.Linear):
        updates = 0

        def forward(self, inputs: Tensor) -> Tensor:
            if torch.is_grad_enabled() and any(tmp_path.iterdir()):
                self.updates += 1
                if self.updates == 3:
                    raise ValueError("a part of my own broke")
            return super().forward(inputs)

    with pytest.raises(ValueError, match="of my own"):
        fit(tmp_path, Breaks(3, 1))
    (folder,) = tmp_path.iterdir()
    assert kinds(folder)[-2:] == ["ledger", "failure"]
    RunFolder.open(folder).close()
