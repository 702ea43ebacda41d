"""One recording from every format, with the same numbers; and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.core.errors import DataError, RequestError
from surefoot.diagnosis.columns import Name, canonical
from surefoot.diagnosis.doctor import examine
from surefoot.diagnosis.readers import read_recording
from surefoot.diagnosis.recording import Recording

STEPS = 30
LOSS = [2 / (1 + n / 10) for n in range(STEPS)]
RATE = [1e-3 * (n + 1) / STEPS for n in range(STEPS)]
VALIDATION = {9: 1.5, 19: 1.25, 29: 1.125}


def check(recording: Recording, name: str = "val") -> None:
    assert recording["loss"].values.tolist() == pytest.approx(LOSS, rel=1e-6)
    assert recording["lr"].values.tolist() == pytest.approx(RATE, rel=1e-6)
    assert recording["loss"].steps.tolist() == list(range(STEPS))
    found, series = recording.validation
    assert found == name
    assert dict(zip(series.steps.tolist(), series.values.tolist(), strict=True)) == VALIDATION
    assert recording.last_step == STEPS - 1


def test_csv(tmp_path: Path) -> None:
    lines = ["Step,Train Loss,learning_rate,val_loss,comment"]
    for n in range(STEPS):
        lines.append(f"{n},{LOSS[n]!r},{RATE[n]!r},{VALIDATION.get(n, '')},abc")
    (tmp_path / "log.csv").write_text("\n".join(lines))
    recording = read_recording(tmp_path / "log.csv")
    check(recording)
    assert recording.ignored == ("comment",)


def test_flat_jsonl_with_events_facts_and_a_torn_line(tmp_path: Path) -> None:
    rows = [{"global_step": n, "loss": LOSS[n], "lr-AdamW": RATE[n]} for n in range(STEPS)]
    for n, value in VALIDATION.items():
        rows.append({"global_step": n, "val/loss": value})
    lines = [json.dumps({"facts": {"precision": "fp16"}}), *map(json.dumps, rows)]
    lines.append(json.dumps({"kind": "failure", "step": 29, "message": "out of memory"}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + '\n{"global_step": 3')
    recording = read_recording(tmp_path / "a.jsonl")
    check(recording)
    assert recording.facts == {"precision": "fp16"}
    assert [event.message for event in recording.events] == ["out of memory"]


@pytest.mark.parametrize(("said", "at"), [({}, 14), ({"step": 12}, 12), ({"iteration": 13}, 13)])
def test_an_event_says_its_step_or_stands_between_the_rows(
    tmp_path: Path, said: dict[str, int], at: int
) -> None:
    lines = [json.dumps({"iteration": n, "loss": LOSS[n]}) for n in range(STEPS)]
    lines.insert(15, json.dumps({"kind": "resume", "message": "from last.ckpt", **said}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert [event.step for event in read_recording(tmp_path / "a.jsonl").events] == [at]


def test_trainer_state(tmp_path: Path) -> None:
    history: list[dict[str, float]] = []
    for n in range(STEPS):
        history.append({"step": n, "epoch": n / 10, "loss": LOSS[n], "learning_rate": RATE[n]})
        if n in VALIDATION:
            history.append({"step": n, "eval_loss": VALIDATION[n], "eval_runtime": 3.0})
    history.append({"step": STEPS - 1, "train_loss": 99.0, "train_runtime": 1.0})
    folder = tmp_path / "checkpoint-30"
    folder.mkdir()
    state = {"log_history": history, "max_steps": 30}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    for path in (tmp_path, folder, folder / "trainer_state.json"):
        recording = read_recording(path)
        check(recording, "eval")
        assert recording.facts["horizon_updates"] == 30


def test_tensorboard(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for n in range(STEPS):
        writer.add_scalar("train/loss", LOSS[n], n)
        writer.add_scalar("lr/matrices", RATE[n], n)
        writer.add_scalar("lr/vectors", RATE[n] / 2, n)
        if n in VALIDATION:
            writer.add_scalar("val/loss", VALIDATION[n], n)
    writer.add_text("note", "not a number", 3)
    writer.close()
    check(read_recording(tmp_path))
    check(read_recording(next(tmp_path.iterdir())))


def test_numbers_that_are_not_finite_stay(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"step": 1, "loss": 1.0, "grad_norm": null}\n'
        '{"step": 2, "loss": "NaN", "grad_norm": NaN}\n'
        '{"step": 3, "loss": -Infinity, "grad_norm": "inf"}\n'
    )
    recording = read_recording(tmp_path / "a.jsonl")
    assert recording["loss"].values[0] == 1.0
    assert math.isnan(recording["loss"].values[1])
    assert recording["loss"].values[2] == -math.inf
    assert recording["loss"].non_finite_rows == {1, 2}
    assert recording["grad_norm"].rows.tolist() == [1, 2]
    steps, loss, norm = recording.aligned("loss", "grad_norm")
    assert steps.tolist() == [2, 3]
    assert np.isinf(norm[1])
    assert len(loss) == 2


def test_a_log_without_steps_counts_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("epoch;loss\n0;2.0\n1;1.5\n2;1.0\n")
    assert read_recording(tmp_path / "a.csv")["loss"].steps.tolist() == [0, 1, 2]
    (tmp_path / "b.csv").write_text("loss\n2.0\n1.5\n")
    assert read_recording(tmp_path / "b.csv")["loss"].steps.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.csv", "", DataError),
        ("a.csv", "colour,shape\nred,round\n", DataError),
        ("a.jsonl", '{"loss": 1}\nno json\n{"loss": 2}\n', DataError),
        ("a.json", "{}", DataError),
        ("a.json", "[", DataError),
        ("a.txt", "colour 3", RequestError),
    ],
)
def test_what_is_no_log_is_refused(
    name: str, text: str, error: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=r"log|state"):
        read_recording(tmp_path / name)


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such run"):
        read_recording(tmp_path / "nothing")
    with pytest.raises(RequestError, match="holds no log"):
        read_recording(tmp_path)


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("train/loss_step", Name("", "loss")),
        ("grad_norm/vision", Name("", "grad_norm/vision")),
        ("time/step_seconds", Name("", "step_seconds")),
        ("valid.accuracy", Name("evaluation:valid", "accuracy")),
        ("eval_samples_per_second", None),
        ("GPU Util", Name("", "device_utilization")),
        ("my own thing", None),
    ],
)
def test_names(column: str, name: Name | None) -> None:
    assert canonical(column) == name


@pytest.mark.parametrize(
    ("column", "name", "factor"),
    [
        ("memory_allocated_gb", "memory_bytes", 2.0**30),
        ("gpu memory (MiB)", "memory_bytes", 2.0**20),
        ("rss_mb", "host_memory_bytes", 2.0**20),
        ("system/gpu.0.memoryAllocatedBytes", "memory_bytes", 1.0),
        ("step_time_ms", "step_seconds", 1e-3),
        ("data_seconds", "data_seconds", 1.0),
    ],
)
def test_a_name_may_say_its_unit(tmp_path: Path, column: str, name: str, factor: float) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, column: 1.5}))
    recording = read_recording(tmp_path / "log.jsonl")
    assert recording[name].values.tolist() == [1.5 * factor]
    assert recording.ignored == ()


ENDED = "CUDA out of memory. Tried to allocate 3.25 GiB"


@pytest.mark.parametrize(
    "told",
    [
        {"event": "crash", "step": 30, "traceback": ENDED},
        {"event": "exception", "step": 30, "message": ENDED},
        {"error": ENDED, "step": 30},
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_an_event_is_told_in_many_ways(tmp_path: Path, kind: str, told: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = [{"step": n, "loss": LOSS[n]} for n in range(STEPS)]
    rows.append(told)
    path = tmp_path / f"log.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "json":
        path.write_text(json.dumps({"log_history": rows}))
    else:
        names = ["step", "loss", *(told.keys() - {"step"})]
        cells = [",".join(str(row.get(name, "")) for name in names) for row in rows]
        path.write_text("\n".join([",".join(names), *cells]))
    recording = read_recording(path)
    assert [(event.step, event.message) for event in recording.events] == [(30, ENDED)]
    assert len(recording["loss"]) == STEPS
    assert [finding.slug for finding in examine(recording).findings] == ["out-of-memory"]


def test_a_row_may_hold_numbers_and_an_event(tmp_path: Path) -> None:
    lines = ["step,loss,event", "1,2.0,", "2,1.9,resumed from checkpoint", "3,1.8,"]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    recording = read_recording(tmp_path / "log.csv")
    assert recording["loss"].values.tolist() == [2.0, 1.9, 1.8]
    assert [(event.step, event.kind) for event in recording.events] == [
        (2, "resumed from checkpoint")
    ]
