"""What a spike does to a whole run: told, not applied, gone back behind; also after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.core.errors import CheckpointError, RequestError, SpikeError
from surefoot.core.reports import StepReport
from surefoot.engine.loop import Loop
from surefoot.observe.events import read_events
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.state.checkpoint import list_checkpoints, step_of
from surefoot.train_step import TrainStep
from surefoot.trainer import Trainer
from surefoot.verify.state_hash import checkpoint_hash

NUM_SAMPLES, BATCH = 1200, 4
HORIZON = 250
STRANGE = (700,)
"""Samples whose targets are a thousand times those of the others."""


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().sum()


def train(
    runs: Path,
    resume: Path | None = None,
    strange: tuple[int, ...] = STRANGE,
    checkpoint: str = "20 steps",
    seed: int = 0,
    **guard: Any,
) -> Path:
    torch.manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 3)
    targets = inputs.sum(1, keepdim=True) + torch.randn(NUM_SAMPLES, 1)
    targets[list(strange)] *= 1000.0
    settings = {
        "seed": seed,
        "train": {"horizon": f"{HORIZON} steps", "micro_batch": BATCH},
        "optimizer": {"lr": 1e-3},
        "evaluate": {"every": "never"},
        "checkpoint": {"every": checkpoint, "keep": 20},
        "log": {"console": "off"},
        "guard": guard,
    }
    trainer = Trainer(
        nn.Linear(3, 1), (inputs, targets), squared_error, settings=settings, runs=runs
    )
    result = trainer.fit(resume=resume)
    assert result.folder is not None
    return result.folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [deterministic(row) for row in read_rows(folder / "metrics.jsonl")]


def events(folder: Path, kind: str) -> list[Any]:
    return [event for event in read_events(folder / "events.jsonl") if event.kind == kind]


def last_hash(folder: Path) -> str:
    return checkpoint_hash(list_checkpoints(folder / "checkpoints")[-1])


def die_at(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is lost once the update of that window has been told."""
    run = Loop.run

    def mortal(self: Loop) -> Any:
        class Dies:
            def on_step(self, report: StepReport) -> None:
                if report.window == window:
                    raise KeyboardInterrupt

            def on_eval(self, report: Any) -> None: ...
            def on_event(self, event: Any) -> None: ...
            def close(self) -> None: ...

        self.parts.log.observers = (*self.parts.log.observers, Dies())
        return run(self)

    monkeypatch.setattr(Loop, "run", mortal)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("told"))


def test_by_default_a_spike_is_told_and_nothing_else_changes(told: Path) -> None:
    (spike,) = events(told, "spike")
    assert STRANGE[0] in spike.data["sample_ids"] and spike.data["policy"] == "log"
    (row,) = [row for row in rows(told) if row["window"] == spike.data["window"]]
    assert row["applied"] and row["loss"] > 10_000


def test_a_skipped_spike_moves_nothing(told: Path, tmp_path: Path) -> None:
    folder = train(tmp_path, spikes="skip")
    (spike,) = events(folder, "spike")
    window = spike.data["window"]
    (row,) = [row for row in rows(folder) if row["window"] == window]
    assert not row["applied"] and row["step"] == window - 1
    assert rows(folder)[: window - 1] == rows(told)[: window - 1]
    assert max(row["loss"] for row in rows(folder)[window:]) < 100


def test_a_killed_run_with_skips_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = (700, 10, 400)
    whole = train(tmp_path / "whole", strange=strange, spikes="skip")
    assert len(events(whole, "spike")) >= 2
    for dies in (90, 137, 200):
        runs = tmp_path / str(dies)
        with monkeypatch.context() as patched:
            die_at(dies, patched)
            with pytest.raises(KeyboardInterrupt):
                train(runs, strange=strange, spikes="skip")
        (killed,) = runs.iterdir()
        train(runs, resume=killed, strange=strange, spikes="skip")
        assert rows(killed) == rows(whole) and last_hash(killed) == last_hash(whole)


ROLL_BACK = {"spikes": "roll-back", "roll_back_updates": 10, "leave_out_windows": 15}


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("rolled"), **ROLL_BACK)


def test_a_run_goes_back_and_leaves_the_windows_around_the_spike_out(
    told: Path, rolled_back: Path
) -> None:
    (back,) = events(rolled_back, "roll-back")
    window = back.data["spike_window"]
    assert window == events(told, "spike")[0].data["window"]
    found = rows(rolled_back)
    # Before: the same as ever. The windows around the spike: counted, not trained on.
    before = window - 1 - ROLL_BACK["roll_back_updates"]
    assert found[:before] == rows(told)[:before]
    left_out = found[before : before + 15]
    assert [row["window"] for row in left_out] == list(range(before + 1, before + 16))
    assert all(row["weight"] == 0 and not row["applied"] for row in left_out)
    assert [row["window"] for row in found] == list(range(1, len(found) + 1))
    after = found[before + 15 :]
    assert all(row["applied"] and row["loss"] < 100 for row in after)
    assert after[0]["step"] == before + 1 and after[-1]["step"] == HORIZON
    # What was undone stands aside, the spike too.
    (aside,) = rolled_back.glob("metrics.before-resume-*.jsonl")
    assert max(row["loss"] for row in read_rows(aside)) > 10_000  # type: ignore[type-var]
    steps = [step_of(path) for path in list_checkpoints(rolled_back / "checkpoints")]
    assert steps == sorted({*range(0, HORIZON, 20), HORIZON})


@pytest.mark.parametrize("after_spike", [-5, 1, 12])
def test_a_killed_run_that_rolls_back_goes_on_exactly(
    rolled_back: Path, after_spike: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (back,) = events(rolled_back, "roll-back")
    with monkeypatch.context() as patched:
        die_at(back.data["spike_window"] + after_spike, patched)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, **ROLL_BACK)
    (killed,) = tmp_path.iterdir()
    train(tmp_path, resume=killed, **ROLL_BACK)
    assert rows(killed) == rows(rolled_back) and last_hash(killed) == last_hash(rolled_back)


def test_a_second_spike_after_a_roll_back_is_found(tmp_path: Path) -> None:
    folder = train(tmp_path, strange=(700, 10, 400), **ROLL_BACK)
    assert len(events(folder, "roll-back")) >= 2
    assert max(row["loss"] for row in rows(folder)) < 100


def test_a_spent_budget_stops_with_the_state_before_the_spike_on_disk(tmp_path: Path) -> None:
    with pytest.raises(SpikeError, match="is a spike"):
        train(tmp_path, strange=(700, 10, 400), spike_budget=1, **ROLL_BACK)
    (folder,) = tmp_path.iterdir()
    assert list_checkpoints(folder / "checkpoints") and events(folder, "failure")


def test_without_an_old_enough_checkpoint_the_run_fails_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.run.resume_point.newest_whole", _none_left)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(tmp_path, **ROLL_BACK)


def _none_left(*_: Any, **__: Any) -> Any:
    raise CheckpointError("no complete checkpoint was found at or before step 3")


def test_your_own_loop_has_nothing_to_go_back_to() -> None:
    settings = {"train": {"horizon": "5 steps"}, "guard": {"spikes": "roll-back"}}
    with pytest.raises(RequestError, match="cannot roll back"):
        TrainStep(nn.Linear(3, 1), squared_error, settings=settings)
