"""Data that can only be read in sequence, with a state of its own.

A stream runs in the training process. Its state is taken at the micro-batch that was returned, not
at what was read ahead, so a resume neither repeats nor loses samples.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from surefoot.core.errors import DataError, RequestError, SurefootError
from surefoot.core.interruption import RAISED_BY_USER_CODE
from surefoot.data.augment import preserved_cpu_rng, seed_for_sample
from surefoot.data.batch import MicroBatch
from surefoot.data.collate import collate_samples
from surefoot.data.fetch import WeightFunction, aligned, checked_weights, collated
from surefoot.data.order import START, Cursor
from surefoot.data.plan import Batches, Reader
from surefoot.data.sources.base import Source


@dataclass(frozen=True)
class StreamCursor:
    """Position of a run in a stream: counts, and the stream's own state."""

    epoch: int
    position: int
    """Samples consumed in this epoch."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The result of the stream's `state_dict()`; JSON values only."""

    def as_json(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "state": dict(self.state)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamCursor:
        return cls(int(value["epoch"]), int(value["position"]), dict(value["state"]))


@dataclass(frozen=True)
class StreamPlan:
    """How a stream is divided into micro-batches and windows.

    Args:
        micro_batch: samples of one forward pass.
        window_length: micro-batches per update. The last window of an epoch may be short.
        seed: key of the randomness of samples, by (seed, epoch, position).
    """

    micro_batch: int
    window_length: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("micro_batch", "window_length"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}", rule=f"{name} >= 1")

    @property
    def samples_per_window(self) -> int:
        """Samples of a whole window."""
        return self.micro_batch * self.window_length

    @property
    def drop_short(self) -> bool:
        """A short last window is kept: where a stream ends is known only when it has ended."""
        return False

    @property
    def epoch_length(self) -> None:
        """Only its end tells."""

    @property
    def samples_per_epoch(self) -> None:
        """Only its end tells."""

    @property
    def order_promise(self) -> str:
        """What a resume may rely on, for the record."""
        return "the stream's own state"

    def check_fit(self, source: Any, num_workers: int) -> None:
        """Refuses a source that is no stream, or workers that would each have a state of it."""
        if not isinstance(source, StreamSource):
            raise RequestError(
                f"a StreamPlan does not fit {source.name}",
                rule="a stream needs a StreamPlan, a map-style dataset a BatchPlan",
            )
        if num_workers > 0:
            raise RequestError(
                f"the stream {source.name} cannot be read by {num_workers} workers",
                where="loader.workers",
                rule="a stream has one state, kept in the training process",
                remedy="set loader.workers to 0",
            )

    def read(self, reader: Reader, cursor: Any) -> Batches:
        """Micro-batches from `cursor` on, epoch after epoch, without end."""
        return reader.streamed(self, cursor)

    def read_epoch(self, reader: Reader, cursor: Any) -> Batches:
        """Micro-batches from `cursor` to the end of its epoch."""
        with closing(reader.streamed(self, cursor)) as batches:
            for batch in batches:
                yield batch
                if batch.ends_epoch:
                    return


class StreamSource:
    """An iterable with `state_dict` and `load_state_dict`.

    Args:
        stream: has `__iter__`, `state_dict()` (JSON values) and `load_state_dict(state)`. Its state
            advances before a sample is yielded, not after. Iterating it again after its end starts
            another epoch; `set_epoch(epoch)`, if it exists, is called first.
        name: used in messages; default: the class name.
        collate: collates samples; default: `collate_samples`.

    Raises:
        DataError: the stream has no state.

    >>> class Numbers:
    ...     def __init__(self):
    ...         self.place = 0
    ...     def __iter__(self):
    ...         while self.place < 3:
    ...             self.place += 1
    ...             yield float(self.place)
    ...         self.place = 0
    ...     def state_dict(self):
    ...         return {"place": self.place}
    ...     def load_state_dict(self, state):
    ...         self.place = state["place"]
    >>> source = StreamSource(Numbers())
    >>> batches = source.micro_batches(StreamPlan(micro_batch=2), weight=len)
    >>> source, next(batches).data.tolist()
    (StreamSource('Numbers'), [1.0, 2.0])
    """

    is_random = True

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        name: str = "",
        collate: Callable[[Any], Any] = collate_samples,
    ) -> None:
        self.name = name or type(stream).__name__
        if not is_stream(stream):
            raise DataError(
                f"{self.name} has no state_dict and load_state_dict",
                rule="a stream has __iter__, state_dict and load_state_dict",
                remedy="add them, or pass a dataset with __len__ and __getitem__ instead",
            )
        self.stream: Any = stream
        self._collate = collate

    def __repr__(self) -> str:
        return f"StreamSource({self.name!r})"

    def collate(self, samples: Sequence[Any]) -> Any:
        return self._collate(samples)

    def fingerprint(self) -> str:
        """The stream's own `fingerprint()`, or a text that says that its content is unknown."""
        own = getattr(self.stream, "fingerprint", None)
        return f"own:{own()}" if callable(own) else f"stream:{self.name}"

    def micro_batches(
        self,
        plan: StreamPlan,
        weight: WeightFunction,
        cursor: Cursor | StreamCursor | Mapping[str, Any] = START,
    ) -> Generator[MicroBatch, None, None]:
        """Micro-batches on the CPU from `cursor` on, epoch after epoch, without end.

        Args:
            plan: sizes and seed.
            weight: number of loss-bearing items of a collated batch.
            cursor: the start, a `StreamCursor` or its JSON form.

        Raises:
            DataError: the stream fails, is empty, or its state is not JSON.
            RequestError: the cursor is that of a map-style dataset.
        """
        return _Reader(self, plan, weight).run(self._start(cursor))

    def _start(self, cursor: Cursor | StreamCursor | Mapping[str, Any]) -> StreamCursor | None:
        if isinstance(cursor, Mapping):
            return StreamCursor.from_json(cursor)
        if isinstance(cursor, StreamCursor):
            return cursor
        if cursor == START:
            return None
        raise RequestError(
            f"the stream {self.name} cannot continue at sample {cursor.position}",
            rule="a stream continues from its own state",
            remedy="resume with the dataset that the run was started with",
        )


def is_stream(data: Any) -> bool:
    """Whether an object has the methods of a stream."""
    return all(hasattr(data, name) for name in ("__iter__", "state_dict", "load_state_dict"))


def by_index(source: Source | StreamSource) -> Source | None:
    """The source, if its samples can be read by index; None for a stream: it is not read ahead."""
    return None if isinstance(source, StreamSource) else source


def first_samples(source: Source | StreamSource, most: int) -> list[Any]:
    """The first samples, at most so many; none of a stream: it is not read ahead."""
    indexed = by_index(source)
    if indexed is None:
        return []
    return [indexed[index] for index in range(min(most, len(indexed)))]


def refuse_stream(source: Any) -> None:
    """Refuses a stream as a validation set.

    Raises:
        DataError: an evaluation starts from the beginning each time, and a stream continues.
    """
    if isinstance(source, StreamSource):
        raise DataError(
            f"{source.name} is a stream",
            where="validation",
            rule="every evaluation reads the same samples, by index",
            remedy="give a dataset with __len__ and __getitem__, such as a list of its samples",
        )


class _Reader:
    """Divides one stream into micro-batches."""

    def __init__(self, source: StreamSource, plan: StreamPlan, weight: WeightFunction) -> None:
        self._source = source
        self._plan = plan
        self._weight = weight

    def run(self, cursor: StreamCursor | None) -> Generator[MicroBatch, None, None]:
        epoch, position = (cursor.epoch, cursor.position) if cursor else (0, 0)
        restored = cursor is not None
        if cursor is not None:
            with preserved_cpu_rng():
                self._call(epoch, position, self._load, cursor.state)
        while True:
            count = 0
            for batch in self._epoch(epoch, position, restored):
                count += batch.samples
                yield batch
            if count == 0 and position == 0:
                raise DataError(
                    f"the stream {self._source.name} yielded no sample in epoch {epoch}",
                    rule="iterating a stream again after its end starts from the beginning",
                    remedy="reset its position at the end of __iter__",
                )
            epoch, position, restored = epoch + 1, 0, False

    def _epoch(self, epoch: int, position: int, restored: bool) -> Iterator[MicroBatch]:
        plan = self._plan
        with preserved_cpu_rng():
            iterator = self._call(epoch, position, self._open, epoch)
            ahead = self._read(iterator, epoch, position)
            if ahead is None and restored and position == 0:
                # Some streams save "at the end" after an epoch; iterated again, they start over.
                iterator = self._call(epoch, position, self._open, epoch)
                ahead = self._read(iterator, epoch, position)
        in_window = (position // plan.micro_batch) % plan.window_length
        while ahead is not None:
            in_window = (in_window + 1) % plan.window_length
            with preserved_cpu_rng():
                batch, ahead = self._next_batch(iterator, ahead, epoch, position, in_window == 0)
            position += batch.samples
            yield batch

    def _next_batch(
        self,
        iterator: Iterator[Any],
        ahead: tuple[Any],
        epoch: int,
        first: int,
        ends_window: bool,
    ) -> tuple[MicroBatch, tuple[Any] | None]:
        """One micro-batch that begins with the sample read ahead, and the sample after it."""
        samples = [ahead[0]]
        following: tuple[Any] | None = ahead
        while len(samples) < self._plan.micro_batch and following is not None:
            following = self._read(iterator, epoch, first + len(samples))
            if following is not None:
                samples.append(following[0])
        position = first + len(samples)
        # Taken before the next sample is read to find out whether there is one.
        after = StreamCursor(epoch, position, self._state(epoch, position))
        if following is not None:
            following = self._read(iterator, epoch, position)
        if following is None:
            after = StreamCursor(epoch + 1, 0, self._state(epoch, position))
        ids = list(range(first, position))
        seed_for_sample(self._plan.seed, epoch, first)
        data = aligned(collated(self._source, samples, ids))
        weights = checked_weights(self._weight, data, self._source, ids)
        ends_epoch = following is None
        batch = MicroBatch(
            data,
            weights,
            len(ids),
            tuple(ids),
            after,
            ends_window or ends_epoch,
            ends_epoch,
            epoch,
        )
        return batch, following

    def _load(self, state: Mapping[str, Any]) -> None:
        self._source.stream.load_state_dict(copy.deepcopy(dict(state)))

    def _open(self, epoch: int) -> Iterator[Any]:
        set_epoch = getattr(self._source.stream, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(self._source.stream)

    def _read(self, iterator: Iterator[Any], epoch: int, position: int) -> tuple[Any] | None:
        """The sample at `position`, in a tuple; None at the end."""
        nothing = object()
        sample = self._call(epoch, position, next, iterator, nothing)
        return None if sample is nothing else (sample,)

    def _call(self, epoch: int, position: int, call: Callable[..., Any], *args: Any) -> Any:
        """Calls into the stream, seeded by position."""
        seed_for_sample(self._plan.seed, epoch, position)
        try:
            return call(*args)
        except SurefootError:
            raise
        except RAISED_BY_USER_CODE as error:
            raise DataError(
                f"the stream {self._source.name} failed: {type(error).__name__}: {error}",
                where=f"{self._source.name}, epoch {epoch}, sample {position}",
                rule="a stream yields samples until it ends",
            ) from error

    def _state(self, epoch: int, position: int) -> Mapping[str, Any]:
        state = self._call(epoch, position, self._source.stream.state_dict)
        try:
            # A copy that the stream cannot change.
            stored = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise self._not_json(str(error)) from error
        if stored != state or not isinstance(stored, dict):
            raise self._not_json(f"it is {stored} once it has been stored")
        return stored

    def _not_json(self, detail: str) -> DataError:
        return DataError(
            f"the state of the stream {self._source.name} cannot be stored: {detail}",
            rule="state_dict() returns JSON values: numbers, text, lists, dicts with text keys",
            remedy="return only such values from state_dict",
        )
