"""`surefoot train --replay EVENT` runs a bad update again, to the bit, and names the module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surefoot.build import run_recipe
from surefoot.config.load import load_recipe, resolve_recipe
from surefoot.core.errors import EXIT_REQUEST, NonFiniteError, RequestError
from surefoot.observe.bad_batches import keep_batch, read_event
from surefoot.observe.events import read_events
from surefoot.verify.replay import BEGINNING, replay

MODULE = """
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(3, generator=generator)
        if index in BAD:
            x = x * BAD[index]
        return x, x.sum(0, keepdim=True)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1)
    def forward(self, x):
        return self.last(self.dropout(torch.relu(self.first(x))))

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum()
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(name: str, bad: dict[int, float], **guard: Any) -> Any:
        text = f"from math import nan, inf\nBAD = {bad!r}\n{MODULE}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        content = {
            "name": name,
            "model": {"kind": "custom", "target": f"{name}:Net"},
            "data": {"kind": "custom", "target": f"{name}:Data"},
            "task": {"kind": "function", "loss": f"{name}:loss"},
            "train": {"horizon": "150 steps", "micro_batch": 4},
            "optimizer": {"kind": "adamw", "lr": 1e-3},
            "evaluate": {"every": "never"},
            "checkpoint": {"every": "25 steps", "keep": 10},
            "log": {"console": "off"},
            "guard": guard,
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(content))
        monkeypatch.chdir(tmp_path)
        return load_recipe(str(path))

    return write


def events(folder: Path, kind: str) -> list[Any]:
    return [event for event in read_events(folder / "events.jsonl") if event.kind == kind]


def test_a_nan_is_kept_replayed_and_traced(recipe: Any, tmp_path: Path) -> None:
    resolved = recipe("poisoned", {301: float("nan")})
    with pytest.raises(NonFiniteError, match="that is not finite is that of first"):
        run_recipe(resolved, run_root=tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    (event,) = events(folder, "non-finite")
    assert event.data["first_bad"]["forward"]["module"] == "first"
    evidence = folder / event.data["evidence"]
    batch = load_file(evidence / "batch.safetensors")
    assert any(tensor.isnan().any() for tensor in batch.values())
    done = replay(evidence)
    assert done.window == event.data["window"] and done.is_same
    assert done.first_bad == event.data["first_bad"]
    assert done.begun_from.startswith("step-") or done.begun_from == BEGINNING
    assert done.num_rerun == (done.window - 1) % 25


def test_a_spike_is_replayed_to_the_bit_also_from_the_beginning(
    recipe: Any, tmp_path: Path
) -> None:
    resolved = recipe("spiky", {250: 1e4})
    folder = run_recipe(resolved, run_root=tmp_path / "runs").folder
    assert folder is not None
    (event,) = events(folder, "spike")
    evidence = folder / event.data["evidence"]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = replay(evidence / "event.json")
    assert done.is_same and done.recorded["loss"] == event.data["loss"]
    assert "everything is finite" in done.meaning
    assert set(done.largest_gradients) <= {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    import shutil

    shutil.rmtree(folder / "checkpoints")
    again = replay(evidence)
    assert again.begun_from == BEGINNING and again.is_same
    assert again.num_rerun == again.window - 1


def test_a_spike_that_was_rolled_back_is_replayed_on_its_own_course(
    recipe: Any, tmp_path: Path
) -> None:
    guard = {"spikes": "roll-back", "roll_back_updates": 30, "leave_out_windows": 40}
    resolved = recipe("rolled", {250: 1e4, 10: 1e4}, **guard)
    folder = run_recipe(resolved, run_root=tmp_path / "runs").folder
    assert folder is not None
    for event in events(folder, "spike"):
        assert replay(folder / event.data["evidence"]).is_same


def test_a_window_of_a_run_with_another_horizon_is_replayed_at_its_own_rate(
    recipe: Any, tmp_path: Path
) -> None:
    resolved = recipe("extended", {250: 1e4})
    warming = resolve_recipe(resolved.as_dict(), ["schedule.kind=constant", "schedule.warmup=0.9"])
    short = resolve_recipe(warming.as_dict(), ['train.horizon="20 steps"'])
    folder = run_recipe(short, run_root=tmp_path / "runs").folder
    assert folder is not None and not events(folder, "spike")
    run_recipe(warming, run_root=tmp_path / "runs", resume=folder)
    (event,) = events(folder, "spike")
    done = replay(folder / event.data["evidence"])
    assert done.is_same and done.num_rerun > 0


def test_the_command_says_what_it_found(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from surefoot.cli import main as command

    resolved = recipe("said", {250: 1e4})
    folder = run_recipe(resolved, run_root=tmp_path / "runs").folder
    assert folder is not None
    evidence = folder / events(folder, "spike")[0].data["evidence"]
    answer = tmp_path / "answer.json"
    assert command.invoke(["train", "--replay", str(evidence), "--json", str(answer)]) == 0
    assert "bit-equal" in capsys.readouterr().out
    assert command.invoke(["train", "--replay", str(evidence), "--dry-run"]) == EXIT_REQUEST
    found = json.loads(answer.read_text())
    assert found["is_same"] is True and found["largest_gradients"]


def test_what_is_no_event_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not an event that can be replayed"):
        read_event(tmp_path)


def test_at_most_so_many_batches_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.core.reports import Event
    from surefoot.observe import bad_batches as evidence

    monkeypatch.setattr(evidence, "MAX_KEPT_BATCHES", 2)
    batch: tuple[Tensor, dict[str, Tensor]] = (torch.ones(2), {"a": torch.ones(1)})
    kept = [
        keep_batch(tmp_path, Event("spike", 1, "", {"window": window}), [batch], {})
        for window in (1, 2, 2, 3)
    ]
    assert [path is not None for path in kept] == [True, True, True, False]
