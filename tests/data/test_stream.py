"""Streams: their place is that of the micro-batch handed out, and a resume repeats nothing."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError, RequestError
from surefoot.data.batch import MicroBatch
from surefoot.data.loader import Loader, LoaderSettings
from surefoot.data.order import BatchPlan, Cursor
from surefoot.data.sources.stream import StreamCursor, StreamPlan, StreamSource


def one(batch: Any) -> float:
    return float(len(batch))


class Numbers:
    """Counts to `length`, adds noise, and starts over; keeps its place as a user would."""

    def __init__(self, length: int = 11) -> None:
        self.length = length
        self.position = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < self.length:
            self.position += 1
            noise = random.random() + np.random.rand() + float(torch.rand(()))
            yield torch.tensor(self.position + noise, dtype=torch.float64)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class SavesItsEnd(Numbers):
    """Iterates anew each time unless a state was loaded, and says "at the end" after an epoch."""

    restored = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.restored = self.restored, 0
        for number in range(start, self.length):
            self.position = number + 1
            yield torch.tensor(float(number))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state["position"]


def loader_of(stream: Any, **fields: Any) -> Loader:
    plan = StreamPlan(**{"micro_batch": 3, "window_length": 2, "seed": 4, **fields})
    return Loader(StreamSource(stream), plan, weight=one)


def outline(batch: MicroBatch) -> tuple[Any, ...]:
    return (
        batch.data.tolist(),
        batch.ids,
        batch.cursor_after,
        batch.ends_window,
        batch.ends_epoch,
        batch.epoch,
        batch.samples,
        batch.weights,
    )


def take(loader: Loader, count: int, cursor: Any = Cursor()) -> list[tuple[Any, ...]]:  # noqa: B008
    return [outline(batch) for batch in itertools.islice(loader.iterate(cursor), count)]


def test_a_stream_is_cut_into_windows_and_epochs() -> None:
    stream = Numbers()
    batches = take(loader_of(stream), 6)
    assert [ids for _, ids, *_ in batches] == [
        (0, 1, 2),
        (3, 4, 5),
        (6, 7, 8),
        (9, 10),
        (0, 1, 2),
        (3, 4, 5),
    ]
    assert [batch[3] for batch in batches] == [False, True, False, True, False, True]
    assert [batch[4] for batch in batches] == [False, False, False, True, False, False]
    assert batches[0][2] == StreamCursor(0, 3, {"position": 3})
    assert batches[3][2] == StreamCursor(1, 0, {"position": 0})
    assert stream.epochs == [0, 1]


@pytest.mark.parametrize("length", [9, 11, 12])
@pytest.mark.parametrize("kind", [Numbers, SavesItsEnd])
def test_every_cursor_continues_the_same_stream(kind: type[Numbers], length: int) -> None:
    whole = take(loader_of(kind(length)), 12)
    for stop in range(11):
        stored = json.loads(json.dumps(whole[stop][2].as_json()))
        assert StreamCursor.from_json(stored) == whole[stop][2]
        assert take(loader_of(kind(length)), 11 - stop, stored) == whole[stop + 1 :]
        assert take(loader_of(kind(length)), 1, whole[stop][2]) == whole[stop + 1 : stop + 2]


def test_what_a_stream_draws_is_keyed_and_leaves_no_trace() -> None:
    random.seed(3)
    before = (random.getstate(), torch.get_rng_state())
    first = take(loader_of(Numbers()), 6)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    random.seed(4)
    torch.manual_seed(4)
    assert take(loader_of(Numbers()), 6) == first
    assert take(loader_of(Numbers(), seed=5), 6) != first
    # The second epoch looks different.
    assert first[0][0] != first[4][0]
    # Another batch size does not change what a sample looks like.
    assert take(loader_of(Numbers(), micro_batch=6), 1)[0][0] == first[0][0] + first[1][0]


def test_one_pass_ends_with_the_epoch() -> None:
    assert sum(batch.samples for batch in loader_of(Numbers()).iterate_once()) == 11


def test_the_state_is_a_copy() -> None:
    class Shared(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.state = {"position": 0}

        def state_dict(self) -> dict[str, Any]:
            self.state["position"] = self.position
            return self.state

    batches = list(itertools.islice(loader_of(Shared()).iterate(), 3))
    assert [batch.cursor_after.as_json()["state"]["position"] for batch in batches] == [3, 6, 9]


def test_a_stream_that_fails_is_named() -> None:
    class Torn(Numbers):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.tensor(1.0)
            raise OSError("torn")

    with pytest.raises(DataError, match="the stream Torn failed: OSError: torn") as caught:
        take(loader_of(Torn()), 1)
    assert caught.value.where == "Torn, epoch 0, sample 1"

    class Ragged(Numbers):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.ones(2)
            yield torch.ones(3)

    with pytest.raises(DataError, match="cannot be collated into one batch") as caught:
        take(loader_of(Ragged()), 1)
    assert "sample 0: float32[2]; sample 1: float32[3]" in caught.value.where


def test_an_empty_epoch_is_an_error() -> None:
    class Once(Numbers):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number in range(self.position, 4):
                self.position += 1
                yield torch.tensor(float(number))

    with pytest.raises(DataError, match="yielded no sample in epoch 1") as caught:
        take(loader_of(Once()), 4)
    assert "starts from the beginning" in caught.value.rule


@pytest.mark.parametrize("state", [{"x": torch.ones(1)}, {1: 2}, {"x": (1, 2)}, [1], {"x": {1}}])
def test_a_state_that_no_checkpoint_can_hold_is_refused(state: Any) -> None:
    class Odd(Numbers):
        def state_dict(self) -> Any:
            return state

    with pytest.raises(DataError, match="the state of the stream Odd cannot be stored"):
        take(loader_of(Odd()), 1)


def test_a_stream_without_a_state_is_refused() -> None:
    with pytest.raises(DataError, match="has no state_dict and load_state_dict"):
        StreamSource(iter([1, 2]))


def test_a_stream_needs_its_own_plan_cursor_and_process() -> None:
    source = StreamSource(Numbers())
    with pytest.raises(RequestError, match="BatchPlan does not fit Numbers"):
        Loader(source, BatchPlan(11, 3), weight=one)
    with pytest.raises(RequestError, match="cannot be read by 2 workers"):
        Loader(source, StreamPlan(3), weight=one, settings=LoaderSettings(workers=2))
    with pytest.raises(RequestError, match="cannot continue at sample 3"):
        next(Loader(source, StreamPlan(3), weight=one).iterate(Cursor(0, 3)))
    with pytest.raises(RequestError):
        StreamPlan(0)


def test_the_fingerprint_says_how_much_is_known() -> None:
    assert StreamSource(Numbers()).fingerprint() == "stream:Numbers"

    class Known(Numbers):
        def fingerprint(self) -> str:
            return "v1"

    assert StreamSource(Known()).fingerprint() == "own:v1"
