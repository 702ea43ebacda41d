"""The metrics log: every window once, over resumes, kills and full disks, in strict JSON."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

import pytest

from observe.samples import EVALUATION, REPORT, report
from surefoot.core.errors import CheckpointError, DataError, RunFolderError, SurefootError
from surefoot.observe.metrics_log import MetricsLog, last_step_row, read_rows
from surefoot.observe.metrics_schema import ROWS, deterministic, number, schema


def rows(path: Path) -> list[dict[str, object]]:
    return list(read_rows(path))


def windows(path: Path) -> list[object]:
    return [row["window"] for row in rows(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_every_field_of_a_report_stands_in_its_row(path: Path) -> None:
    log = MetricsLog(path, utilization=lambda: 0.75)
    log.on_step(REPORT)
    log.on_eval(EVALUATION)
    log.close()
    step, evaluation = rows(path)
    step_fields = REPORT._asdict()
    del step_fields["ends_epoch"]  # It follows from `epoch` of the next row.
    for row, fields in ((step, step_fields), (evaluation, dataclasses.asdict(EVALUATION))):
        for name, value in fields.items():
            assert row[name] == (list(value) if isinstance(value, tuple) else value)
    assert step["device_utilization"] == 0.75


def test_the_schema_names_exactly_the_columns_that_stand_there(path: Path) -> None:
    log = MetricsLog(path)
    log.append(REPORT)
    log.append(EVALUATION)
    log.close()
    for row in rows(path):
        assert [column.name for column in ROWS[str(row["row"])]] == list(row)
    written = json.loads(path.with_name("metrics.schema.json").read_text())
    assert written == schema()
    for columns in written["rows"].values():
        for column in columns.values():
            assert column["kind"] in ("deterministic", "measured")
            assert column["description"]


def test_only_times_and_resources_are_measured() -> None:
    measured = {c.name for columns in ROWS.values() for c in columns if c.kind == "measured"}
    assert measured == {
        "step_seconds",
        "data_seconds",
        "tokens_per_second",
        "samples_per_second",
        "memory_bytes",
        "device_utilization",
        "memory_allocated_bytes",
        "memory_reserved_bytes",
        "energy_joules",
        "mfu",
        "seconds",
        "time",
    }


def test_rows_are_strict_json_and_non_finite_numbers_stay_what_they_are(path: Path) -> None:
    log = MetricsLog(path)
    log.append(report(1, loss=math.nan, grad_norm=math.inf, terms={"ce": -math.inf}))
    log.append(dataclasses.replace(EVALUATION, metrics={"loss": math.nan}))
    log.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    step, evaluation = rows(path)
    assert (step["loss"], step["grad_norm"], step["terms"]) == (
        "NaN",
        "Infinity",
        {"ce": "-Infinity"},
    )
    assert evaluation["metrics"] == {"loss": "NaN"}
    assert deterministic(step) == deterministic(dict(step))  # A NaN equals itself.
    assert math.isnan(number(step["loss"]))
    assert number(step["grad_norm"]) == math.inf
    assert number(3) == 3.0
    with pytest.raises(ValueError, match="not a number"):
        number("many")


def test_floats_come_back_bit_for_bit(path: Path) -> None:
    values = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1 / 3, -0.0]
    log = MetricsLog(path)
    for count, value in enumerate(values, start=1):
        log.append(report(count, loss=value))
    log.close()
    assert [str(row["loss"]) for row in rows(path)] == [repr(value) for value in values]


def test_any_mapping_and_any_name_can_be_written(path: Path) -> None:
    log = MetricsLog(path)
    log.append(report(1, lr=MappingProxyType({'größe "a"': 0.5}), terms=MappingProxyType({})))
    log.close()
    (row,) = rows(path)
    assert (row["lr"], row["terms"]) == ({'größe "a"': 0.5}, {})


def test_deterministic_columns_are_equal_where_only_times_differ(path: Path) -> None:
    log = MetricsLog(path)
    log.append(report(1))
    log.append(report(1, step_seconds=9.0, data_seconds=8.0, memory_bytes=7, time=6.0))
    log.append(report(1, sample_ids=(5, 9, 11)))
    log.close()
    first, second, third = rows(path)
    assert first != second
    assert deterministic(first) == deterministic(second) != deterministic(third)


def test_many_sample_ids_are_kept_as_their_digest(path: Path) -> None:
    ids = tuple(range(65))
    log = MetricsLog(path)
    log.append(report(1, sample_ids=ids[:64]))
    log.append(report(2, sample_ids=ids))
    log.close()
    few, many = rows(path)
    assert few["sample_ids"] == list(range(64))
    assert many["sample_ids"] is None
    expected = blake2b(b"".join(i.to_bytes(8, "little") for i in ids), digest_size=8).hexdigest()
    assert many["sample_ids_digest"] == expected
    assert array("q").itemsize == 8


def test_speeds_come_from_the_counts_of_neighbouring_rows(path: Path) -> None:
    log = MetricsLog(path)
    log.append(report(1, samples=32, tokens=1000, step_seconds=0.5))
    offset = log.sync()
    log.append(report(2, samples=96, tokens=4000, step_seconds=0.25))
    log.append(report(3, step_seconds=0.0))
    log.close()
    first, second, third = rows(path)
    assert (first["samples_per_second"], first["tokens_per_second"]) == (64.0, 2000.0)
    assert (second["samples_per_second"], second["tokens_per_second"]) == (256.0, 12000.0)
    assert third["samples_per_second"] is third["tokens_per_second"] is None
    log = MetricsLog(path)
    log.resume_at(offset)
    log.append(report(2, samples=96, tokens=4000, step_seconds=0.25))
    log.close()
    assert rows(path)[1]["tokens_per_second"] == 12000.0


def test_rows_wait_in_memory_and_are_handed_over_in_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log = MetricsLog(path)
    log.append(report(1))
    now[0] += 0.99
    log.append(report(2))
    assert path.stat().st_size == 0
    now[0] += 0.01
    log.append(report(3))
    assert windows(path) == [1, 2, 3]
    log.close()


def test_sync_writes_through_and_gives_the_offset(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    log = MetricsLog(path)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), fsync(fd)))
    log.append(report(1))
    offset = log.sync()
    assert offset == path.stat().st_size > 0
    assert synced == [offset]
    log.close()


def test_a_resume_leaves_every_window_once_and_keeps_the_tail_beside(path: Path) -> None:
    log = MetricsLog(path)
    for window in range(1, 6):
        log.append(report(window))
    offset = log.sync()
    for window in range(6, 9):
        log.append(report(window, loss=7.0))
    log.close()
    with open(path, "ab") as file:
        file.write(b'{"row":"step","st')  # What a kill leaves.

    log = MetricsLog(path)
    aside = log.resume_at(offset)
    for window in range(6, 11):
        log.append(report(window))
    log.close()
    assert aside == path.with_name("metrics.before-resume-1.jsonl")
    assert windows(path) == list(range(1, 11))
    assert windows(aside) == [6, 7, 8]
    assert aside.read_bytes().endswith(b'{"row":"step","st')

    log = MetricsLog(path)
    assert log.resume_at(0) == path.with_name("metrics.before-resume-2.jsonl")
    log.append(report(1))
    log.close()
    assert windows(path) == [1]
    assert windows(path.with_name("metrics.before-resume-2.jsonl")) == list(range(1, 11))


def test_a_resume_at_the_end_moves_nothing(path: Path) -> None:
    log = MetricsLog(path)
    log.append(report(1))
    offset = log.sync()
    log.close()
    log = MetricsLog(path)
    assert log.resume_at(offset) is None
    log.close()
    assert sorted(p.name for p in path.parent.iterdir()) == ["metrics.jsonl", "metrics.schema.json"]


def test_a_living_log_can_go_back(path: Path) -> None:
    log = MetricsLog(path)
    log.append(report(1))
    offset = log.sync()
    log.append(report(2))
    aside = log.resume_at(offset)
    log.append(report(2, loss=1.0))
    log.close()
    assert [row["loss"] for row in rows(path)] == [2.5, 1.0]
    assert aside is not None
    assert windows(aside) == [2]


@pytest.mark.parametrize("shift", [-1, 1, 10**9, -(10**9)])
def test_an_offset_that_is_not_of_this_log_is_refused(path: Path, shift: int) -> None:
    log = MetricsLog(path)
    log.append(report(1))
    offset = log.sync()
    log.close()
    before = path.read_bytes()
    log = MetricsLog(path)
    with pytest.raises(CheckpointError, match="ends at byte"):
        log.resume_at(offset + shift)
    log.close()
    assert path.read_bytes() == before


def test_rows_of_an_earlier_run_are_not_written_behind(path: Path) -> None:
    log = MetricsLog(path)
    log.append(report(1))
    log.close()
    log = MetricsLog(path)
    with pytest.raises(RunFolderError, match="earlier run"):
        log.append(report(2))
    log.close()
    assert windows(path) == [1]


def test_reading_leaves_a_torn_last_line_out_and_names_a_bad_one(path: Path) -> None:
    log = MetricsLog(path)
    log.append(report(1))
    log.append(report(2))
    log.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in (first, first + 1, first + 40, len(whole) - 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert windows(path) == [1]
    path.write_bytes(whole[: first - 5] + b"\n" + whole[first:])
    with pytest.raises(DataError) as caught:
        rows(path)
    assert caught.value.where == f"{path}:1"


@pytest.mark.parametrize("left", [b"\0" * 4096, b'{"row":"step","step":3' + b"\0" * 60])
def test_what_a_power_cut_leaves_after_the_last_row_is_passed_over(path: Path, left: bytes) -> None:
    path.write_bytes(b'{"row":"step","step":2}\n' + left + b"\n")
    assert last_step_row(path) == {"row": "step", "step": 2}


def test_the_last_step_row_is_found_from_the_end(path: Path) -> None:
    log = MetricsLog(path)
    assert last_step_row(path) is None
    for window in range(1, 60):
        log.append(report(window))
    for _ in range(40):
        log.append(EVALUATION)
    log.close()
    with open(path, "ab") as file:
        file.write(b'{"row":"step","window":99')
    for tail_bytes in (7, 100, 1000, 1 << 16):
        row = last_step_row(path, tail_bytes=tail_bytes)
        assert row is not None
        assert row["window"] == 59


def test_a_full_disk_stops_the_run_and_loses_no_row(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(path)
    log.append(report(1))
    log.sync()
    log.append(report(2))
    log.append(report(3))
    write = os.write
    room = [10]  # Bytes left on the disk, in the middle of a row.

    def limited(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    for _ in range(2):
        with pytest.raises(SurefootError, match="No space left") as caught:
            log.flush()
    assert str(path) in str(caught.value)
    assert windows(path) == [1]
    room[0] = 10**6
    log.append(report(4))
    assert log.sync() == path.stat().st_size
    log.close()
    assert windows(path) == [1, 2, 3, 4]


# Later Pythons warn of any fork beside threads; this child only closes and exits.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_write_the_rows_of_its_parent(path: Path) -> None:
    log = MetricsLog(path)
    log.append(report(1))
    child = os.fork()
    if child == 0:
        log.close()
        os._exit(0)
    os.waitpid(child, 0)
    log.append(report(2))
    log.close()
    assert windows(path) == [1, 2]


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from surefoot.observe import metrics_log
from surefoot.observe.metrics_log import MetricsLog
from observe.samples import report
metrics_log.FLUSH_SECONDS = 0.0005
path = Path(sys.argv[1])
log = MetricsLog(path)
offset, window = int(sys.argv[3]), int(sys.argv[4])
log.resume_at(offset)
while True:
    window += 1
    log.append(report(window))
    if window % 50 == 0:
        print(log.sync(), window, flush=True)
"""


def test_kills_in_the_middle_of_writes_leave_every_window_once(path: Path) -> None:
    offset = window = 0
    for attempt in range(5):
        here = str(Path(__file__).parents[1])
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), here, str(offset), str(window)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        lines += process.communicate()[0].splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        offset, window = map(int, whole[-1].split())
    log = MetricsLog(path)
    log.resume_at(offset)
    log.append(report(window + 1))
    log.close()
    assert windows(path) == list(range(1, window + 2))
    moved = Counter(w for p in path.parent.glob("*before-resume*") for w in windows(p))
    assert moved


def test_resources_are_asked_once_for_many_rows_with_their_speed(path: Path) -> None:
    asked = []

    def resources(speed: float | None) -> dict[str, float | None]:
        asked.append(speed)
        return {"energy_joules": 5.0 * len(asked)}

    log = MetricsLog(path, resources=resources)
    for window in (1, 2, 3):
        log.append(report(window))
    log.append(EVALUATION)
    log.flush()
    log.append(report(4))
    log.close()
    # 32 samples in half a second each.
    assert asked == [64.0, 64.0]
    found = [row.get("energy_joules") for row in rows(path)]
    assert found == [None, None, 5.0, None, 10.0]


def test_the_gap_is_to_the_mean_training_loss_also_after_a_resume(path: Path) -> None:
    log = MetricsLog(path)
    log.append(EVALUATION)
    log.append(report(1, loss=1.0, weight=30.0))
    log.append(report(2, loss=2.0, weight=10.0))
    log.append(report(3, loss=math.nan, weight=10.0, applied=False))
    offset = log.sync()
    log.append(EVALUATION)
    log.close()
    first, *_, last = rows(path)
    assert first["gap"] is None
    assert last["gap"] == EVALUATION.metrics["loss"] - 1.25
    resumed = MetricsLog(path)
    resumed.resume_at(offset)
    resumed.append(EVALUATION)
    resumed.close()
    assert rows(path)[-1] == last


# -- what others do to the file --------------------------------------------------------------------


def delete(path: Path) -> bytes | None:
    path.unlink()
    return None


def replace_by_an_editor(path: Path) -> bytes | None:
    edited = path.read_bytes().replace(b"0.", b"1.")
    path.with_suffix(".new").write_bytes(edited)
    path.with_suffix(".new").rename(path)
    return edited


def replace_by_a_copy(path: Path) -> bytes | None:
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)
    return None


def append(path: Path) -> bytes | None:
    with path.open("ab") as file:
        file.write(b"a word of mine\n")
    return path.read_bytes()


def cut(path: Path) -> bytes | None:
    os.truncate(path, 100)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("hurt", "said"),
    [
        (delete, "DELETED"),
        (replace_by_an_editor, "REPLACED"),
        (replace_by_a_copy, None),
        (append, "CHANGED"),
        (cut, "it begins anew"),
    ],
)
def test_what_others_do_to_the_file_is_noticed_and_mended(
    path: Path, hurt: Callable[[Path], bytes | None], said: str | None
) -> None:
    told: list[str] = []
    log = MetricsLog(path, tell=told.append)
    log.on_step(report(1))
    log.sync()
    strange = hurt(path)
    log.on_step(report(2))
    offset = log.sync()
    log.on_step(report(3))
    log.close()
    assert [said in text for text in told] == [True] if said else not told
    assert windows(path) == ([2, 3] if hurt is cut else [1, 2, 3])
    aside = list(path.parent.glob("metrics.changed-*.jsonl"))
    assert [file.read_bytes()[: len(strange)] for file in aside] == ([strange] if strange else [])
    # What a checkpoint holds of it is right: a resume finds its place.
    MetricsLog(path).resume_at(offset)
