"""TensorBoard: every number of a report under its tag, written by a thread of the sink's own."""

from __future__ import annotations

import builtins
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from observe.samples import EVALUATION, REPORT, report
from surefoot.core.errors import RequestError, SurefootError
from surefoot.core.reports import Event
from surefoot.observe.sinks import TensorBoardSink, scalars

event_file_loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")


def read(folder: Path) -> Iterator[Any]:
    (path,) = folder.iterdir()
    yield from event_file_loader.LegacyEventFileLoader(str(path)).Load()


def values(folder: Path) -> dict[tuple[str, int], float]:
    return {
        (value.tag, event.step): value.simple_value
        for event in read(folder)
        for value in event.summary.value
    }


def test_numbers_arrive_under_their_tags_and_steps(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in range(1, 4):
        sink.on_step(report(step, loss=1.0 / step, weight_norm=2.0))
    sink.on_eval(EVALUATION)
    sink.on_eval(dataclasses.replace(EVALUATION, weights="ema"))
    sink.close()
    sink.close()
    found = values(tmp_path)
    assert [found["train/loss", step] for step in (1, 2, 3)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert found["validation/loss", 3] == pytest.approx(2.4)
    assert found["validation/ema/loss", 3] == pytest.approx(2.4)
    assert found["lr/no_decay", 1] == pytest.approx(3e-4)
    assert found["train/weight_norm", 2] == 2.0


def test_every_number_of_a_report_has_a_tag() -> None:
    found = scalars(REPORT._replace(applied=False))
    assert found == {
        "train/loss": 2.5,
        "train/term/ce": 2.0,
        "train/term/z": 0.5,
        "train/grad_norm": REPORT.grad_norm,
        "lr/decay": 3e-4,
        "lr/no_decay": 3e-4,
        "train/loss_scale": 65536.0,
        "train/skipped": 1.0,
        "time/step_seconds": 0.5,
        "time/data_seconds": 0.001,
        "time/items_per_second": 2048.0,
        "memory/bytes": 123,
    }


def test_a_resume_purges_what_stood_beyond_it(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.on_event(Event("save", 10, "", {}, 1.0))
    sink.on_event(Event("resume", 10, "", {}, 1.0))
    sink.close()
    starts = [event.step for event in read(tmp_path) if event.HasField("session_log")]
    assert starts == [11]


def test_a_write_that_fails_is_the_runs_to_know_and_not_to_wait_for(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)

    class Full:
        def add_event(self, event: object) -> None:
            raise OSError("No space left on device")

        def get_logdir(self) -> str:
            return "here"

        def close(self) -> None:
            pass

    sink._writer.close()
    sink._writer = Full()  # type: ignore[assignment]
    sink.on_step(REPORT)
    with pytest.raises(SurefootError, match="No space left"):
        sink.close()


def test_without_tensorboard_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RequestError, match="not installed") as caught:
        TensorBoardSink(tmp_path)
    assert "surefoot[tensorboard]" in caught.value.remedy


def test_the_module_itself_loads_no_tensorboard() -> None:
    import subprocess

    code = "import sys, surefoot.observe.sinks; print('tensorboard' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout == "False\n"
