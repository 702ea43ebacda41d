"""What `TrainStep` saves is a checkpoint like any other; it goes on from its own alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import surefoot
from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE, CheckpointError, RequestError
from surefoot.core.reports import Event
from surefoot.state import commit
from surefoot.state.checkpoint import write_checkpoint
from surefoot.state.tree import split_tree
from surefoot.state.weights import read_weights

SETTINGS: Mapping[str, Any] = {
    "train": {"horizon": "20 steps"},
    "optimizer": {"lr": 0.05},
    "device": "cpu",
}
GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(64, 4, generator=GENERATOR)
TARGETS = torch.randn(64, 1, generator=GENERATOR)


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    summed: Tensor = (model(inputs) - targets).square().sum()
    return summed


class Heard:
    """Observes, and keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_step(self, report: object) -> None: ...

    def on_eval(self, report: object) -> None: ...

    def on_event(self, event: Event) -> None:
        self.told.append(event.message)


def make_step(*observers: Any, **changes: Mapping[str, Any]) -> surefoot.TrainStep:
    settings = {**SETTINGS, **changes}
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    return surefoot.TrainStep(model, loss_sum, settings=settings, observers=observers)


def train(step: surefoot.TrainStep, first: int, last: int) -> None:
    for number in range(first, last):
        part = slice(8 * (number % 8), 8 * (number % 8) + 8)
        step((INPUTS[part], TARGETS[part]))
    step.settle()


def saved(folder: Path, *updates: int, **changes: Mapping[str, Any]) -> surefoot.TrainStep:
    step = make_step(**changes)
    before = 0
    for at in updates:
        train(step, before, at)
        step.save(folder)
        before = at
    return step


def weight_of(step: surefoot.TrainStep) -> Tensor:
    assert isinstance(step.model, nn.Linear)
    return step.model.weight.detach()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


def test_every_verb_takes_what_a_step_has_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "saved"
    step = saved(folder, 2, 3)
    for path in (folder, folder / "step-00000002"):
        assert command.invoke(["checkpoint", "verify", str(path)]) == EXIT_DONE
    capsys.readouterr()
    assert command.invoke(["checkpoint", "inspect", str(folder), "--json", "-"]) == EXIT_DONE
    answer = json.loads(capsys.readouterr().out)
    assert answer["about"]["settings"]["optimizer"]["lr"] == 0.05
    assert command.invoke(["checkpoint", "inspect", str(folder)]) == EXIT_DONE
    assert f'step.resume("{folder}")' in capsys.readouterr().out
    out = tmp_path / "out"
    assert command.invoke(["checkpoint", "export", str(folder), "--out", str(out)]) == EXIT_DONE
    exported = load_file(out / "model.safetensors")
    for weights in (exported, read_weights(folder), read_weights(folder / "step-00000003")):
        assert torch.equal(weights["weight"], weight_of(step))


def test_a_resumed_step_is_the_one_that_went_on(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", 10)
    saved(tmp_path / "half", 4)
    resumed = make_step()
    assert resumed.resume(tmp_path / "half") == 4
    train(resumed, 4, 10)
    assert torch.equal(weight_of(resumed), weight_of(whole))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"optimizer": {"lr": 1.0}}, "optimizer.lr"),
        ({"train": {"horizon": "7 steps"}}, "train.horizon"),
        ({"train": {"horizon": "20 steps", "clip_norm": 0.5}}, "train.clip_norm"),
        ({"schedule": {"kind": "warmup_cosine", "floor": 0.5}}, "schedule.floor"),
    ],
)
def test_other_settings_are_accepted_by_name_alone(
    tmp_path: Path, changes: Mapping[str, Any], field: str
) -> None:
    saved(tmp_path, 2)
    other = make_step(**changes)
    with pytest.raises(RequestError, match=field):
        other.resume(tmp_path)
    assert other.num_updates == 0 and torch.equal(weight_of(other), torch.full((1, 4), 0.1))
    assert other.resume(tmp_path, accept=[field]) == 2


def test_other_settings_that_do_not_fit_the_state_are_not_accepted(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    other = make_step(optimizer={"kind": "sgd", "lr": 0.05})
    with pytest.raises(RequestError, match="impossible"):
        other.resume(tmp_path, accept=["optimizer"])
    # Where things are written changes no number.
    assert make_step(guard={"deadline": "1 min"}).resume(tmp_path) == 1


def test_a_schedule_that_rewrites_the_past_is_refused(tmp_path: Path) -> None:
    undecided = {"kind": "wsd", "warmup": 2}
    saved(tmp_path, 6, schedule=undecided)
    late = make_step(schedule={**undecided, "cooldown": 4}, train={"horizon": "10 steps"})
    assert late.resume(tmp_path) == 6
    early = make_step(schedule={**undecided, "cooldown": 8}, train={"horizon": "10 steps"})
    with pytest.raises(RequestError, match="another learning rate"):
        early.resume(tmp_path)


def test_a_warm_up_that_is_a_share_stays_what_it_was(tmp_path: Path) -> None:
    share = {"kind": "wsd", "warmup": 0.3}
    saved(tmp_path, 4, schedule=share, train={"horizon": "10 steps"})
    for horizon, last in (("40 steps", 6), ("80 steps", 7)):
        step = make_step(schedule=share, train={"horizon": horizon})
        step.resume(tmp_path)
        train(step, last - 1, last)
        report = step.settle()
        assert report is not None and report.lr["decay"] == 0.05
        step.save(tmp_path)


def test_a_checkpoint_without_settings_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, split_tree({"model": {}}), {"data": {}})
    with pytest.raises(CheckpointError, match="with what settings"):
        make_step().resume(tmp_path)


def test_saves_of_one_step_leave_one_checkpoint(tmp_path: Path) -> None:
    step = saved(tmp_path, 1, 2)
    (tmp_path / "step-00000009.0123.tmp").mkdir()
    step.save(tmp_path)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        make_step().save(tmp_path / "file" / "below")


def test_a_kill_between_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = saved(tmp_path, 1)
    renames: list[Path] = []

    def killed(old: Path, new: Path) -> None:
        renames.append(new)
        if len(renames) == 2:
            raise KeyboardInterrupt  # No handler of an OSError runs, as after SIGKILL.
        old.rename(new)

    with monkeypatch.context() as patched:
        patched.setattr(commit, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            step.save(tmp_path)
    assert [name.endswith(commit.REPLACED_SUFFIX) for name in names_in(tmp_path)] == [True]
    assert make_step().resume(tmp_path) == 1
    assert names_in(tmp_path) == ["step-00000001"]


def test_observers_hear_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "state.json").write_text("{}")
    heard = Heard()
    assert make_step(heard).resume(tmp_path) == 1
    assert len(heard.told) == 1 and "a newer checkpoint was refused" in heard.told[0]
