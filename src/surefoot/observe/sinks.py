"""Other destinations of a run's numbers: TensorBoard.

A sink copies what the run folder holds; nothing is read back from it. It never blocks the run:
reports are queued, and a thread writes them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.core.errors import RequestError, SurefootError
from surefoot.core.reports import EvalReport, Event, StepReport
from surefoot.observe.events import EventKind

FLUSH_SECONDS = 5.0


class TensorBoardSink:
    """Writes scalars to `folder` for TensorBoard; needs the extra `tensorboard`.

    The x-axis is the window, so that skipped updates are visible; for evaluations it is the step.
    After a resume, TensorBoard itself purges what was shown beyond that point.

    Raises:
        RequestError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event as Record
            from tensorboard.compat.proto.event_pb2 import SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise RequestError(
                "TensorBoard is not installed.",
                where="log.tensorboard",
                remedy='pip install "surefoot[tensorboard]", or set log.tensorboard=false',
            ) from error
        self._record, self._session, self._summary = Record, SessionLog, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        self._queue: queue.SimpleQueue[StepReport | EvalReport | Event | None]
        self._queue = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = threading.Thread(
            target=self._write, name="surefoot-tensorboard", daemon=True
        )
        self._thread.start()

    def on_step(self, report: StepReport) -> None:
        self._put(report)

    def on_eval(self, report: EvalReport) -> None:
        self._put(report)

    def on_event(self, event: Event) -> None:
        if event.kind == EventKind.RESUME:
            self._put(event)

    def close(self) -> None:
        """Writes queued items and closes; idempotent.

        Raises:
            SurefootError: a write has failed.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        thread.join()
        self._writer.close()
        self._check()

    def _put(self, item: StepReport | EvalReport | Event) -> None:
        if self._failure is not None:
            self._check()
        self._queue.put(item)

    def _check(self) -> None:
        if self._failure is not None:
            raise SurefootError(
                f"TensorBoard's file cannot be written: {self._failure}",
                where=self._writer.get_logdir(),
            ) from self._failure

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._failure is not None:
                continue  # Raised at the run's next report; until then items are dropped.
            try:
                self._writer.add_event(self._as_record(item))
            except Exception as error:
                self._failure = error

    def _as_record(self, item: StepReport | EvalReport | Event) -> Any:
        moment = item.time or time.time()
        if isinstance(item, Event):
            log = self._session(status=self._session.START)
            return self._record(wall_time=moment, step=item.step + 1, session_log=log)
        values = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(item).items()
        ]
        return self._record(wall_time=moment, step=item.step, summary=self._summary(value=values))


def tensorboard(folder: Path) -> TensorBoardSink:
    """The sink of a run, in `tensorboard/` of its folder."""
    return TensorBoardSink(folder / "tensorboard")


def scalars(report: StepReport | EvalReport) -> Mapping[str, float]:
    """The tags and values of a report."""
    return dict(_step_scalars(report) if isinstance(report, StepReport) else _eval_scalars(report))


def _step_scalars(report: StepReport) -> Iterator[tuple[str, float]]:
    yield "train/loss", report.loss
    for name, value in report.terms.items():
        yield f"train/term/{name}", value
    yield "train/grad_norm", report.grad_norm
    for group, rate in report.lr.items():
        yield f"lr/{group}", rate
    yield "train/loss_scale", report.loss_scale
    yield "train/skipped", 0.0 if report.applied else 1.0
    if report.weight_norm is not None:
        yield "train/weight_norm", report.weight_norm
    yield "time/step_seconds", report.step_seconds
    yield "time/data_seconds", report.data_seconds
    if report.step_seconds > 0:
        yield "time/items_per_second", report.weight / report.step_seconds
    yield "memory/bytes", report.memory_bytes


def _eval_scalars(report: EvalReport) -> Iterator[tuple[str, float]]:
    prefix = report.name if report.weights == "raw" else f"{report.name}/{report.weights}"
    for name, value in report.metrics.items():
        yield f"{prefix}/{name}", value
