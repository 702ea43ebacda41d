"""The protocol of a data plan, for map-style datasets and streams alike."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Protocol

from surefoot.data.batch import MicroBatch

Batches = Generator[MicroBatch, None, None]


class Reader(Protocol):
    """Reads micro-batches of one source."""

    def planned(self, plans: Iterator[Any], num_samples: int) -> Batches:
        """Micro-batches by index: `plans` gives a `PlannedBatch` for each of a dataset."""
        ...

    def streamed(self, plan: Any, cursor: Any) -> Batches:
        """Micro-batches in the order of a stream, as a `StreamPlan` divides it."""
        ...


class DataPlan(Protocol):
    """How a training set is divided into micro-batches and windows."""

    @property
    def micro_batch(self) -> int:
        """Samples of one forward pass on one rank."""
        ...

    @property
    def window_length(self) -> int:
        """Micro-batches per update on one rank."""
        ...

    @property
    def seed(self) -> int:
        """Key of everything random about the samples."""
        ...

    @property
    def drop_short(self) -> bool:
        """Whether a short last window of an epoch is left out."""
        ...

    @property
    def samples_per_window(self) -> int:
        """Samples of a full window over all ranks."""
        ...

    @property
    def epoch_length(self) -> int | None:
        """Positions of one epoch, before any are left out; None if known only at its end."""
        ...

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples consumed by one epoch over all ranks; None if known only at its end."""
        ...

    @property
    def order_promise(self) -> str:
        """What a resume guarantees, for the record."""
        ...

    def check_fit(self, source: Any, num_workers: int) -> None:
        """Refuses a source that the plan does not fit.

        Raises:
            RequestError: it is of the other kind, of another length, or cannot be read so.
        """
        ...

    def read(self, reader: Reader, cursor: Any) -> Batches:
        """Micro-batches from `cursor` on, epoch after epoch, without end."""
        ...

    def read_epoch(self, reader: Reader, cursor: Any) -> Batches:
        """Micro-batches from `cursor` to the end of its epoch."""
        ...
