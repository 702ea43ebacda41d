"""What samples draw is keyed, and costs nothing where nothing is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError
from surefoot.data.augment import DrawWatch, preserved_cpu_rng, seed_for_sample
from surefoot.data.fetch import Fetcher
from surefoot.data.sources.datasets import DatasetSource

SEED, EPOCH = 7, 2
DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "python, gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: float(np.random.rand()),
    "numpy, normal": lambda: float(np.random.randn()),
    "torch": lambda: float(torch.rand(())),
}


class Samples:
    """Counts how often each sample is read; those from `first_drawn` on draw a number."""

    def __init__(self, draw: Callable[[], float], first_drawn: int) -> None:
        self.draw = draw
        self.first_drawn = first_drawn
        self.reads = [0] * 8

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads[index] += 1
        drawn = self.draw() if index >= self.first_drawn else 0.0
        return torch.tensor([float(index), drawn])


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    with preserved_cpu_rng():
        yield


def state() -> tuple[Any, ...]:
    kind, words, position, has_gauss, gauss = np.random.get_state()
    torch_state = torch.default_generator.get_state().tolist()
    return random.getstate(), kind, words.tolist(), position, has_gauss, gauss, torch_state


def keyed(draw: Callable[[], float], index: int) -> float:
    with preserved_cpu_rng():
        seed_for_sample(SEED, EPOCH, index)
        return torch.tensor(draw()).item()


def fetch(samples: Any, ids: list[int]) -> torch.Tensor:
    fetcher = Fetcher(DatasetSource(samples), lambda batch: float(len(batch)), SEED)
    batch, _ = fetcher(EPOCH, np.array(ids, dtype=np.int64))
    assert isinstance(batch, torch.Tensor)
    return batch


def test_where_nothing_is_drawn_each_sample_is_read_once_and_no_generator_is_seeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surefoot.data.fetch.seed_for_sample", None)
    samples, before = Samples(random.random, first_drawn=8), state()
    assert fetch(samples, [3, 1]).tolist() == [[3.0, 0.0], [1.0, 0.0]]
    assert samples.reads == [0, 1, 0, 1, 0, 0, 0, 0]
    assert state() == before


@pytest.mark.parametrize("kind", DRAWS)
def test_a_draw_is_keyed_by_its_sample_whichever_the_generator(kind: str) -> None:
    draw = DRAWS[kind]
    np.random.randn()  # NumPy now holds a second normal number, drawn ahead.
    random.gauss(0.0, 1.0)
    before = state()
    drawn = fetch(Samples(draw, first_drawn=5), [4, 5, 6])[:, 1].tolist()
    assert drawn == [0.0, keyed(draw, 5), keyed(draw, 6)]
    assert state() == before


@pytest.mark.parametrize("kind", DRAWS)
def test_the_first_draw_may_come_late(kind: str) -> None:
    draw = DRAWS[kind]
    fetcher = Fetcher(DatasetSource(Samples(draw, first_drawn=5)), lambda batch: 1.0, SEED)
    batches = [fetcher(EPOCH, np.array([index]))[0][0, 1].item() for index in (1, 2, 7, 3, 6)]
    assert batches == [0.0, 0.0, keyed(draw, 7), 0.0, keyed(draw, 6)]


def test_a_sample_that_fails_is_named_and_the_generators_are_as_before() -> None:
    def fail() -> float:
        torch.rand(())
        raise ValueError("no such file")

    before = state()
    with pytest.raises(DataError, match="reading sample 5 of Samples failed"):
        fetch(Samples(fail, first_drawn=5), [4, 5])
    assert state() == before


def test_the_watch_sees_numpy_move_between_two_batches() -> None:
    watch = DrawWatch()
    assert watch.read(lambda: "first") == "first"
    np.random.randn()
    before = state()
    assert watch.read(lambda: np.random.randn()) is None
    assert state() == before
