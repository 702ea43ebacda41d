"""A stop at any time: work that can be done again is left, what was done is saved or is whole."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from faults.runs_for_faults import INPUTS, TARGETS, fit
from surefoot.cli import main
from surefoot.cli.failure import EXIT_INTERRUPTED
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.run import session as recording
from surefoot.verify.state_hash import checkpoint_hash

LOOKS_BEFORE_A_RUN = 2
"""Calls of a metric that see whether it adds up over samples."""


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
    # As in a process of its own: torch's launcher, once used, leaves its handler behind.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main.invoke(["train", "diabetes-mlp"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == EXIT_INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


def test_a_stop_cuts_an_evaluation_and_the_resume_does_it_again(tmp_path: Path) -> None:
    def run(folder: Path, cut_at: int, resume: Path | None = None):  # type: ignore[no-untyped-def]
        def metric(model: nn.Module, batch: tuple) -> tuple:  # type: ignore[type-arg]
            nonlocal looks
            if looks:  # Before the run, it is looked at what the metric gives.
                looks -= 1
                return model(batch[0]).sum(), float(len(batch[0]))
            seen.append(1)
            interrupt() if len(seen) == cut_at else None
            return model(batch[0]).sum(), float(len(batch[0]))

        seen: list[int] = []
        looks = LOOKS_BEFORE_A_RUN
        torch.manual_seed(0)
        result = fit(
            folder,
            nn.Linear(3, 1),
            validation=(INPUTS, TARGETS),
            metrics={"m": metric},
            schedule={"kind": "plateau", "patience": 1},
            resume=resume,
        )
        return result, len(seen)

    whole, batches = run(tmp_path / "whole", 0)
    assert batches == 10
    stopped, batches = run(tmp_path / "cut", 2)
    assert (stopped.status, stopped.step, batches) == ("stopped", 3, 2)
    resumed, batches = run(tmp_path / "cut", 0, stopped.folder)
    assert (resumed.status, batches) == ("finished", 10)
    assert rows(resumed.folder) == rows(whole.folder)
    again, batches = run(tmp_path / "end", 7)
    assert (again.status, again.step, batches) == ("stopped", 6, 7), "cut at the end"
    resumed, batches = run(tmp_path / "end", 0, again.folder)
    assert (resumed.status, batches) == ("finished", 5)
    assert rows(resumed.folder) == rows(whole.folder)
    hashes = {checkpoint_hash(run.folder / "checkpoints/step-00000006") for run in (whole, resumed)}
    assert len(hashes) == 1


def rows(folder: Path) -> list[dict[str, object]]:
    return [deterministic(row) for row in read_rows(folder / "metrics.jsonl")]


class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Its seventh sample takes for ever."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.parent not in (0, os.getpid()) and index == 7:
            os.kill(self.parent, signal.SIGTERM)
            time.sleep(60)
        return INPUTS[index], TARGETS[index]


def test_a_stop_cuts_a_wait_for_data_and_no_sample_is_lost(tmp_path: Path) -> None:
    def run(folder: Path, parent: int, resume: Path | None = None):  # type: ignore[no-untyped-def]
        torch.manual_seed(0)
        return fit(folder, nn.Linear(3, 1), Slow(parent), resume=resume, loader={"workers": 1})

    whole = run(tmp_path / "whole", 0)
    began = time.monotonic()
    stopped = run(tmp_path / "cut", os.getpid())
    assert time.monotonic() - began < 50, "it did not wait for the sample"
    assert stopped.status == "stopped" and stopped.step < 6
    resumed = run(tmp_path / "cut", 0, stopped.folder)
    assert rows(resumed.folder) == rows(whole.folder)


class Compiles(nn.Linear):
    """Stands for a model whose first forward compiles for a long time."""

    slow = True

    def forward(self, input: Tensor) -> Tensor:
        if self.slow and self.training:
            self.slow = False
            interrupt()
            time.sleep(60)
        return super().forward(input)


def test_a_stop_cuts_the_compilation_and_leaves_a_run_that_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The compiler itself is not what is looked at.
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)
    monkeypatch.setattr("surefoot.assembly.run_parts.check_loss", lambda *args: None)
    began = time.monotonic()
    stopped = fit(tmp_path, Compiles(3, 1), train={"compile": "whole"})
    assert time.monotonic() - began < 50
    assert (stopped.status, stopped.step) == ("stopped", 0)
    other = Compiles(3, 1)
    other.slow = False
    resumed = fit(tmp_path, other, resume=stopped.folder, train={"compile": "whole"})
    assert resumed.step == 6
