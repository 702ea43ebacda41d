"""Delivers micro-batches to the device, in the order of the plan.

The plan alone decides which samples come and when: workers, prefetch and device change the speed
only. Draws from no global random stream and never waits for a worker without a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from surefoot.core.errors import DataError, RequestError
from surefoot.core.interruption import ShouldAbort, never
from surefoot.data.batch import MicroBatch, move_to
from surefoot.data.device_prefetch import DeviceStage
from surefoot.data.fetch import SAME_LENGTH, Fetcher, WeightFunction, place_of
from surefoot.data.order import START, Cursor, PlannedBatch
from surefoot.data.plan import Batches, DataPlan
from surefoot.data.sources.stream import StreamCursor, StreamPlan
from surefoot.data.workers import StartMethod, WorkerPool

AnyCursor = Cursor | StreamCursor | Mapping[str, Any]
"""A cursor, or its JSON form."""


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """How samples are fetched. Changes no bit of what the training sees."""

    workers: int = 0
    """Number of processes that read samples; 0: read in the training process."""
    pin_memory: Literal["auto", "on", "off"] = "auto"
    """Copy through page-locked memory; `auto`: only if the device is a CUDA device."""
    prefetch: int = 2
    """Micro-batches that each worker prepares in advance."""
    deadline_seconds: float = 120.0
    """Longest wait for one micro-batch of a worker, in seconds."""
    start_method: StartMethod = "platform"
    """Start method of workers; `platform` is fork on Linux and spawn elsewhere."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise RequestError(
                    f"loader.{name} is {getattr(self, name)}",
                    where=f"loader.{name}",
                    rule=f"{name} >= {least}",
                )
        if not 0.0 < self.deadline_seconds < float("inf"):
            raise RequestError(
                f"loader.deadline is {self.deadline_seconds} s",
                where="loader.deadline",
                rule="a finite time above zero, so that a stuck worker is detected",
            )


class Loader:
    """Loads the micro-batches of a plan from a source.

    Args:
        source: samples by index (see `surefoot.data.sources.base.Source`), or a `StreamSource`.
        plan: which samples make up each micro-batch (a `StreamPlan` for a stream); its seed keys
            the randomness of samples.
        weight: `weight(batch)`: number of loss-bearing items of a collated CPU batch; called once
            per batch, in the process that collated it.
        settings: workers, prefetch and deadline.
        device: of the batches.

    Raises:
        RequestError: the settings do not fit the device, or the plan does not fit the source.
    """

    def __init__(
        self,
        source: Any,
        plan: DataPlan,
        *,
        weight: WeightFunction,
        settings: LoaderSettings | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.source = source
        self.plan = plan
        self.settings = settings or LoaderSettings()
        self.device = torch.device(device)
        plan.check_fit(source, self.settings.workers)
        self._weight = weight
        self._fetch = Fetcher(source, weight, plan.seed)
        self._stage = DeviceStage.choose(self.device, self.settings.pin_memory)
        self._pool: WorkerPool | None = None
        self._in_use = False

    @property
    def reading(self) -> str:
        """Which samples this process is reading at this moment; empty where it reads none."""
        ids = self._fetch.reading
        return place_of(self.source, ids) if ids else ""

    def iterate(
        self, cursor: AnyCursor = START, should_abort: ShouldAbort = never
    ) -> Generator[MicroBatch, None, None]:
        """Micro-batches from `cursor` on, epoch after epoch, without end. Close it after use.

        Args:
            should_abort: waits for a worker raise `CutShort` once it returns True.
        """
        return self._load(self.plan.read(self._reader(should_abort), cursor))

    def iterate_once(
        self, cursor: AnyCursor = START, should_abort: ShouldAbort = never
    ) -> Generator[MicroBatch, None, None]:
        """Micro-batches from `cursor` to the end of its epoch; `should_abort` as in `iterate`."""
        return self._load(self.plan.read_epoch(self._reader(should_abort), cursor))

    def _reader(self, should_abort: ShouldAbort) -> _SourceReader:
        if self.settings.workers == 0:
            return _SourceReader(self.source, self._weight, self._here)
        fetch = partial(self._in_workers, should_abort=should_abort)
        return _SourceReader(self.source, self._weight, fetch)

    def close(self) -> None:
        """Ends the worker processes. The loader can be used again afterwards."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(
        self, batches: Generator[MicroBatch, None, None]
    ) -> Generator[MicroBatch, None, None]:
        if self._in_use:
            raise RequestError(
                f"the loader of {self.source.name} is already being read",
                rule="one reader at a time",
                remedy="close the first iterator, or create a second loader",
            )
        self._in_use = True
        try:
            if self._stage is not None:
                batches = self._stage.run(batches)
            elif self.device.type != "cpu":
                batches = self._moved(batches)
            with closing(batches):
                yield from batches
        finally:
            self._in_use = False

    def _here(self, plans: Iterable[PlannedBatch]) -> Generator[MicroBatch, None, None]:
        fetch = self._fetch
        for planned in plans:
            data, weights = fetch(planned.epoch, _indices_to_read(planned))
            yield _micro_batch(planned, data, weights)

    def _in_workers(
        self, plans: Iterator[PlannedBatch], should_abort: ShouldAbort
    ) -> Generator[MicroBatch, None, None]:
        if self._pool is None:
            settings = self.settings
            self._pool = WorkerPool(
                self._fetch,
                num_workers=settings.workers,
                prefetch=settings.prefetch,
                deadline_seconds=settings.deadline_seconds,
                start_method=settings.start_method,
            )
        pool = self._pool
        pool.should_abort = should_abort
        whole = False
        try:
            tasks = ((planned, planned.epoch, _indices_to_read(planned)) for planned in plans)
            for planned, (data, weights) in pool.run(tasks):
                yield _micro_batch(planned, data, weights)
            whole = True
        finally:
            # After an early exit (stop, error, Ctrl-C) workers hold results that nobody will fetch.
            if not whole:
                self.close()

    def _moved(
        self, batches: Generator[MicroBatch, None, None]
    ) -> Generator[MicroBatch, None, None]:
        with closing(batches):
            for batch in batches:
                yield batch.with_data(move_to(batch.data, self.device))


@dataclass(frozen=True)
class _SourceReader:
    """Reads the source of a loader, as its plan says."""

    source: Any
    weight: WeightFunction
    fetch: Callable[[Iterator[PlannedBatch]], Batches]

    def planned(self, plans: Iterator[PlannedBatch], num_samples: int) -> Batches:
        return self.fetch(_of_whole_epochs(self.source, plans, num_samples))

    def streamed(self, plan: StreamPlan, cursor: Any) -> Batches:
        batches: Batches = self.source.micro_batches(plan, self.weight, cursor)
        return batches


def _of_whole_epochs(
    source: Any, plans: Iterable[PlannedBatch], num_samples: int
) -> Iterator[PlannedBatch]:
    """The same plans; before each epoch the data must still have all its samples.

    Raises:
        DataError: it has become shorter since the start.
    """
    epoch = -1
    for planned in plans:
        if planned.epoch != epoch:
            epoch = planned.epoch
            now = len(source)
            if now < num_samples:
                raise DataError(
                    f"{source.name} had {num_samples} samples at the start and has "
                    f"{now} now, in epoch {epoch}",
                    where=source.name,
                    rule=SAME_LENGTH,
                    remedy="give each run a copy of the data that nobody changes",
                )
        yield planned


def _indices_to_read(planned: PlannedBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    if planned.indices.size:
        return planned.indices
    return np.array([planned.filler], dtype=np.int64)


def _micro_batch(planned: PlannedBatch, data: Any, weights: dict[str, float]) -> MicroBatch:
    ids = tuple(planned.indices.tolist())
    if not ids:
        # A rank without data: the filler sample gives the batch its shape and has weight 0.
        weights = dict.fromkeys(weights, 0.0)
    return MicroBatch(
        data,
        weights,
        len(ids),
        ids,
        planned.cursor_after,
        planned.ends_window,
        planned.ends_epoch,
        planned.epoch,
    )
