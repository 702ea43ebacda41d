"""`assemble` builds every part of a run once, from what it is given; nothing is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from assembly.parts import INPUTS, TARGETS, assembled, material, settings_of
from surefoot import FunctionTask
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Material, assemble
from surefoot.core.errors import ModelError
from surefoot.core.interruption import CutShort
from surefoot.data.order import Cursor
from surefoot.data.sources.datasets import as_source


def test_a_run_that_begins_has_its_own_horizon_and_a_resumed_one_that_of_its_beginning() -> None:
    schedule = {"kind": "constant", "warmup": 0.5}
    settings = settings_of(schedule=schedule)
    assert assembled(schedule=schedule).begun_for == 6
    resumed = assemble(material(), settings, prepare_process(settings), lambda pace: 12)
    assert resumed.begun_for == 12
    # The warm-up is half of what the run began for.
    assert resumed.schedule(5) == pytest.approx(1.0) and resumed.schedule(2) < 0.6


def test_windows_are_watched_and_closing_them_ends_the_watch() -> None:
    assembly, seen = assembled(), []

    def watch(batches):  # type: ignore[no-untyped-def]
        try:
            for batch in batches:
                seen.append(batch.ids)
                yield batch
        finally:
            seen.append("closed")

    windows = assembly.open_windows(Cursor(), watch=watch)
    window = next(windows)
    windows.close()
    assert seen == [window.sample_ids, "closed"]


def test_an_evaluation_is_left_between_two_batches_and_leaves_no_trace() -> None:
    assembly, calls = assembled(evaluate={"micro_batch": 4}), []
    assembly.material.model.train()

    def leave_at_the_second() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise CutShort

    with pytest.raises(CutShort):
        assembly.evaluator.run(0, before_batch=leave_at_the_second)
    assert assembly.material.model.training
    (report,) = assembly.evaluator.run(0)
    expected = (assembly.material.model(INPUTS[:8]) - TARGETS[:8]).pow(2).mean()
    assert report.metrics["loss"] == pytest.approx(expected.item()) and report.samples == 8


def test_one_batch_is_evaluated_for_the_names_of_the_metrics() -> None:
    assert set(assembled().evaluate_one_batch()) == {"validation/loss"}


def test_a_loss_that_is_a_mean_is_refused() -> None:
    settings = settings_of()
    task = FunctionTask(lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean())
    made = Material(nn.Linear(3, 1), task, as_source((INPUTS, TARGETS), "data"))
    with pytest.raises(ModelError, match="mean"):
        assemble(made, settings, prepare_process(settings))


def test_the_average_is_evaluated_and_the_weights_are_back_afterwards() -> None:
    assembly = assembled(ema={"kind": "on", "decay": 0.5}, evaluate={"weights": "ema"})
    model = assembly.material.model
    before = model.weight.detach().clone()  # type: ignore[operator, union-attr]
    with torch.no_grad():
        model.weight.add_(1.0)  # type: ignore[operator, union-attr]
    (report,) = assembly.evaluator.run(0)
    assert model.weight.equal(before + 1.0)  # type: ignore[operator]
    with torch.no_grad():
        model.weight.copy_(before)  # type: ignore[operator, union-attr]
    expected = (model(INPUTS[:8]) - TARGETS[:8]).pow(2).mean().item()
    assert report.weights == "ema" and report.metrics["loss"] == pytest.approx(expected)
