"""Ctrl-C at any time: before an update the run saves where it stands, elsewhere it says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch import nn

from faults.runs_for_faults import INPUTS, TARGETS, fit
from surefoot import recording
from surefoot.cli import main
from surefoot.cli.failure import EXIT_INTERRUPTED


def interrupt(*args: object, **named: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_before_the_first_update_leaves_a_run_that_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(recording, "write_record", interrupt)
        model = nn.Linear(3, 1)
        start = model.weight.detach().clone()
        stopped = fit(tmp_path, model)
    assert (stopped.status, stopped.step) == ("stopped", 0)
    assert model.weight.equal(start)
    other = nn.Linear(3, 1)
    resumed = fit(tmp_path, other, resume=stopped.folder)
    whole = nn.Linear(3, 1)
    whole.load_state_dict({"weight": start, "bias": model.bias})
    uninterrupted = fit(tmp_path, whole)
    assert resumed.step == uninterrupted.step == 6
    assert other.weight.equal(whole.weight)


def test_the_handler_is_put_back_where_a_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(recording, "make_record", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path)
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_outside_of_training_says_that_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surefoot.config.load.load_recipe", interrupt)
    assert main.run(["train", "diabetes-mlp"]) == EXIT_INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


def test_ctrl_c_in_an_evaluation_finishes_it_and_saves(tmp_path: Path) -> None:
    def metric(model: nn.Module, batch: tuple) -> tuple:  # type: ignore[type-arg]
        interrupt() if not seen else None
        seen.append(1)
        return model(batch[0]).sum(), float(len(batch[0]))

    seen: list[int] = []
    stopped = fit(tmp_path, validation=(INPUTS, TARGETS), metrics={"m": metric})
    assert (stopped.status, stopped.step) == ("stopped", 4)
    assert len(seen) == 5
