"""The metrics log: one JSON row per window and per evaluation, each exactly once over resumes.

Rows are strict JSON; NaN and infinities are strings. Never changes a number and never loses a row
silently: a resume moves rows aside, it does not delete them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import xxhash
from pydantic_core import to_json

from surefoot.core.disk import is_full
from surefoot.core.errors import CheckpointError, DataError, RunFolderError, SurefootError
from surefoot.core.reports import EvalReport, Observer, StepReport
from surefoot.observe.files.atomic import (
    PartialWriteError,
    atomic_write,
    free_name_beside,
    fsync_directory,
    read_from,
    write_all,
)
from surefoot.observe.files.log_file import restore_log_file
from surefoot.observe.metrics_schema import RESOURCES, number, schema

READ_BYTES = 1 << 22
FLUSH_SECONDS = 1.0
MAX_WAITING_BYTES = 1 << 26
"""Largest amount of rows kept in memory while the disk is full."""
MAX_SAMPLE_IDS = 64
GAP_UPDATES = 50
"""Number of updates whose mean training loss an evaluation is compared with."""
NO_RESOURCES: Mapping[str, None] = dict.fromkeys(RESOURCES)


def _encode(row: Mapping[str, object]) -> bytes:
    # Five times faster than json.dumps; floats read back bit-equal.
    return to_json(row, inf_nan_mode="strings", fallback=dict)


class MetricsLog(Observer):
    """Appends rows to `path` and writes `metrics.schema.json` beside it.

    Reports are buffered for about a second and encoded together (half the cost of one at a time),
    then written with one system call. For a log that already holds rows, call `resume_at` before
    adding new ones.

    Args:
        path: the log; created if missing.
        utilization: called for each row; share of time that the device was busy, or None. Must not
            block.
        resources: called about once a second with the samples per second since the last call;
            returns the values of the columns `RESOURCES` for the latest row.
        patient: whether rows wait in memory while the disk is full. `sync` never does.
        tell: called with a message if the file was deleted or changed from outside.

    All methods belong to one thread.
    """

    def __init__(
        self,
        path: Path,
        utilization: Callable[[], float | None] = lambda: None,
        resources: Callable[[float | None], Mapping[str, float | None]] = lambda speed: {},
        patient: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path = path
        self._patient = patient
        self._tell = tell
        self._utilization = utilization
        self._resources = resources
        self._recent_losses: deque[tuple[float, float]] = deque(maxlen=GAP_UPDATES)
        self._waiting: list[tuple[StepReport | EvalReport, float | None]] = []
        self._unwritten = b""
        self._last_flush = time.monotonic()
        self._pid = os.getpid()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        self._hash, self._hashed = xxhash.xxh3_128(), 0
        self._may_append = self._size == 0
        self._samples_before: int | None = 0 if self._may_append else None
        self._tokens_before = 0
        schema_path = path.with_name(f"{path.stem}.schema.json")
        atomic_write(schema_path, json.dumps(schema(), indent=1) + "\n")

    # -- writing -------------------------------------------------------------------------------

    def append(self, report: StepReport | EvalReport) -> None:
        """Adds one row.

        Raises:
            RunFolderError: the log holds rows and `resume_at` was not called.
            SurefootError: the rows cannot be written (a full disk); they are kept for a retry.
        """
        if not self._may_append:
            raise RunFolderError(
                "The metrics log holds rows of an earlier run.",
                where=str(self.path),
                rule="a log continues at the byte offset stored in a checkpoint",
                remedy="call resume_at(offset); resume_at(0) starts empty and keeps the old rows",
            )
        self._waiting.append((report, self._utilization()))
        if time.monotonic() - self._last_flush >= FLUSH_SECONDS:
            self._flush_or_wait()

    def on_step(self, report: StepReport) -> None:
        self.append(report)

    def on_eval(self, report: EvalReport) -> None:
        self.append(report)

    def _lines(self) -> Iterator[bytes]:
        steps = [index for index, (r, _) in enumerate(self._waiting) if isinstance(r, StepReport)]
        samples_before, seconds = self._samples_before, 0.0
        for index, (report, utilization) in enumerate(self._waiting):
            if isinstance(report, EvalReport):
                yield _encode(self._eval_row(report)) + b"\n"
                continue
            row = self._step_row(report, utilization)
            seconds += report.step_seconds
            if index == steps[-1]:
                known = samples_before is not None and seconds > 0
                speed = (report.samples - (samples_before or 0)) / seconds if known else None
                row |= self._resources(speed)
            yield _encode(row) + b"\n"

    def _step_row(self, report: StepReport, utilization: float | None) -> dict[str, object]:
        seconds = report.step_seconds
        tokens_per_second = samples_per_second = None
        if self._samples_before is not None and seconds > 0:
            samples_per_second = (report.samples - self._samples_before) / seconds
            tokens_per_second = (report.tokens - self._tokens_before) / seconds
        self._samples_before = report.samples
        self._tokens_before = report.tokens
        if report.applied:
            self._recent_losses.append((report.loss, report.weight))
        ids = report.sample_ids
        return {
            "row": "step",
            "step": report.step,
            "window": report.window,
            "epoch": report.epoch,
            "samples": report.samples,
            "tokens": report.tokens,
            "loss": report.loss,
            "terms": report.terms,
            "weight": report.weight,
            "grad_norm": report.grad_norm,
            "clipped": report.clipped,
            "applied": report.applied,
            "lr": report.lr,
            "loss_scale": report.loss_scale,
            "sample_ids": ids if len(ids) <= MAX_SAMPLE_IDS else None,
            "sample_ids_digest": digest(ids),
            "weight_norm": report.weight_norm,
            "details": report.details,
            "step_seconds": seconds,
            "data_seconds": report.data_seconds,
            "tokens_per_second": tokens_per_second,
            "samples_per_second": samples_per_second,
            "memory_bytes": report.memory_bytes,
            "device_utilization": utilization,
            **NO_RESOURCES,
            "time": report.time,
        }

    def _eval_row(self, report: EvalReport) -> dict[str, object]:
        return {
            "row": "eval",
            "step": report.step,
            "name": report.name,
            "metrics": report.metrics,
            "gap": _gap(report.metrics.get("loss"), self._recent_losses),
            "weight": report.weight,
            "samples": report.samples,
            "weights": report.weights,
            "seconds": report.seconds,
            "time": report.time,
        }

    def flush(self) -> None:
        """Passes waiting rows to the operating system: they survive a kill, not a power failure.

        Raises:
            SurefootError: the write failed; unwritten rows are kept for a retry.
        """
        self._last_flush = time.monotonic()
        if os.getpid() != self._pid:
            return  # A forked child's copy of the waiting rows is not written.
        self._unwritten += b"".join(self._lines())
        self._waiting.clear()
        if not self._unwritten:
            return
        self._keep_place()
        try:
            self._size += write_all(self._descriptor, self._unwritten)
        except OSError as error:
            if isinstance(error, PartialWriteError):
                self._size += error.written
                # The rest of a partly written row continues where the file ends.
                self._unwritten = self._unwritten[error.written :]
            raise self._unwritable(error) from error
        self._unwritten = b""

    def _flush_or_wait(self) -> None:
        try:
            self.flush()
        except SurefootError as error:
            may_wait = self._patient and len(self._unwritten) < MAX_WAITING_BYTES
            if not (may_wait and is_full(error.__cause__)):
                raise

    def _unwritable(self, error: OSError) -> SurefootError:
        return SurefootError(
            f"The metrics log cannot be written: {error.strerror}.",
            where=str(self.path),
            rule="a run continues only while its record is complete",
            remedy="free some space, then resume the run from its last checkpoint",
        )

    def sync(self) -> int:
        """Writes all rows to the disk (fsync); returns the byte offset after the last one.

        Raises:
            SurefootError: the disk refused.
        """
        self.flush()
        self._keep_place()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            # Some disks report only now that they are full. What they refused may be lost, and no
            # retry can make it good.
            raise self._unwritable(error) from None
        return self._size

    def digest(self) -> str:
        """Hash of all rows that are on the disk; reads those since the last time."""
        if self._hashed > self._size:
            self._hash, self._hashed = xxhash.xxh3_128(), 0
        while self._hashed < self._size:
            part = os.pread(
                self._descriptor, min(READ_BYTES, self._size - self._hashed), self._hashed
            )
            if not part:
                break
            self._hash.update(part)
            self._hashed += len(part)
        return self._hash.hexdigest()

    def _keep_place(self) -> None:
        if os.getpid() != self._pid:
            return
        # If this fails, so does the checkpoint, or the next attempt succeeds.
        with suppress(OSError):
            found = restore_log_file(self.path, self._descriptor, self._size)
            if found is not None:
                self._descriptor, self._size = found.descriptor, found.size
                self._hash, self._hashed = xxhash.xxh3_128(), 0
                if found.told:
                    self._tell(found.told)

    def close(self) -> None:
        """Writes waiting rows and closes; idempotent."""
        if self._descriptor < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    # -- resuming ------------------------------------------------------------------------------

    def resume_at(self, offset: int) -> Path | None:
        """Continues after `offset`, a value returned by `sync`; rows beyond it are moved aside.

        They go to `metrics.before-resume-N.jsonl`; their last line may be torn. A kill in between
        may leave them in two such files, never in none.

        Returns:
            the file with the moved rows, or None if there were none.

        Raises:
            CheckpointError: the log is shorter than `offset`, or no row ends there.
        """
        self.flush()
        size = _size_beyond(self._descriptor, self.path, offset)
        aside = None
        if size > offset:
            aside = free_name_beside(self.path, "before-resume")
            atomic_write(aside, read_from(self._descriptor, offset))
            os.ftruncate(self._descriptor, offset)
        os.fsync(self._descriptor)
        fsync_directory(self.path.parent)
        self._size = offset
        self._hash, self._hashed = xxhash.xxh3_128(), 0
        self._may_append = True
        self._samples_before, self._tokens_before = self._counts_at_end()
        self._recent_losses = deque(_losses_at_end(self.path), GAP_UPDATES)
        return aside

    def begin_anew(self) -> Path | None:
        """Continues with an empty log during a run; all rows are moved aside, as in `resume_at`."""
        aside = self.resume_at(0)
        # The first row has no earlier row to compute speeds from.
        self._samples_before = None
        return aside

    def _counts_at_end(self) -> tuple[int | None, int]:
        """Samples and tokens of the last step row, the base of the next row's speeds."""
        row = last_step_row(self.path)
        if row is None:
            return (0, 0) if self._size == 0 else (None, 0)
        return int(str(row["samples"])), int(str(row["tokens"]))


def digest(sample_ids: tuple[int, ...]) -> str:
    """BLAKE2b-64 of sample ids as little-endian 64-bit integers, in hexadecimal."""
    ids = array("q", sample_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return blake2b(ids, digest_size=8).hexdigest()


def strict(value: object) -> object:
    """`value` with non-finite floats as strings and mappings as dicts, fit for strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


# -- reading -----------------------------------------------------------------------------------


def refuse_misfit(path: Path, offset: int, digest: str = "") -> None:
    """Checks that a log can continue after `offset`; a missing one is empty. Only reads.

    Args:
        digest: of the rows before `offset`, as `MetricsLog.digest` gave it; empty: not compared.

    Raises:
        CheckpointError: the log is shorter than `offset`, no row ends there, or a row before it
            was changed.
    """
    with open(path if path.exists() else os.devnull, "rb") as file:
        _size_beyond(file.fileno(), path, offset)
        if not digest:
            return
        found = xxhash.xxh3_128()
        while offset > 0 and (part := file.read(min(READ_BYTES, offset))):
            found.update(part)
            offset -= len(part)
    if found.hexdigest() != digest:
        raise CheckpointError(
            "A row of the metrics log was changed since the run wrote it.",
            where=str(path),
            rule="the rows before a checkpoint are those that it was saved with",
            remedy="restore the log from a copy",
        )


def _size_beyond(descriptor: int, path: Path, offset: int) -> int:
    size = os.fstat(descriptor).st_size
    is_inside = 0 < offset <= size and os.pread(descriptor, 1, offset - 1) == b"\n"
    if offset != 0 and not is_inside:
        raise CheckpointError(
            f"The metrics log does not hold a row that ends at byte {offset}.",
            where=str(path),
            rule="a checkpoint's log offset is the end of a row of its own run's log",
            remedy=f"the log has {size} bytes; restore it from a copy",
        )
    return size


def read_rows(path: str | Path, end: float = math.inf) -> Iterator[dict[str, object]]:
    """The complete rows of a log in order; a torn last line is left out.

    Args:
        end: byte offset after the last row to read.

    Non-finite numbers stay strings, as in the file; `metrics_schema.number` converts them to
    floats.

    Raises:
        DataError: a line inside the log is not a row; it is named.
    """
    with open(path, "rb") as file:
        position = 0
        for line_number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or position >= end:
                return
            position += len(line)
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or "row" not in row:
                    raise ValueError("no row")
            except ValueError:
                raise DataError(
                    "A line of the metrics log is not a row.",
                    where=f"{path}:{line_number}",
                    rule="each line is one JSON object with the key `row`",
                    remedy="restore the log from a copy, or look at what else wrote to it",
                ) from None
            yield row


def last_step_row(path: str | Path, *, tail_bytes: int = 1 << 16) -> dict[str, object] | None:
    """The last complete row of an update, read from the end of the file; None if there is none.

    Zero pages left by a power failure are skipped.

    Raises:
        ValueError: there are rows of updates, and none of them is complete.
    """
    spoilt: ValueError | None = None
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        while True:
            start = max(0, size - tail_bytes)
            file.seek(start)
            lines = file.read(size - start).split(b"\n")
            whole = lines[:-1] if start == 0 else lines[1:-1]
            for line in reversed(whole):
                if line.startswith(b'{"row":"step"'):
                    try:
                        row: dict[str, object] = json.loads(line)
                    except ValueError as error:
                        spoilt = error
                    else:
                        return row
            if start == 0:
                if spoilt is not None:
                    raise spoilt
                return None
            tail_bytes *= 8


def _gap(loss: float | None, recent: Iterable[tuple[float, float]]) -> float | None:
    """The loss minus the weighted mean of recent training losses; None without either."""
    pairs = list(recent)
    weight = sum(weight for _, weight in pairs)
    if loss is None or not weight:
        return None
    return loss - sum(loss * weight for loss, weight in pairs) / weight


def _losses_at_end(path: Path) -> list[tuple[float, float]]:
    """(loss, weight) of the last applied updates of a log, oldest first."""
    lines: deque[bytes] = deque(maxlen=GAP_UPDATES)
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b'{"row":"step"') and b'"applied":true' in line:
                lines.append(line)
    rows = [json.loads(line) for line in lines]
    return [(number(row["loss"]), number(row["weight"])) for row in rows]
