"""Arrays, datasets, parts of them, and the choice of a source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from surefoot.core.errors import DataError, MissingDataError, RequestError
from surefoot.data.augment import AugmentedSource
from surefoot.data.fetch import Fetcher
from surefoot.data.fingerprint import hash_value, sampled_indices
from surefoot.data.sources.arrays import ArraySource
from surefoot.data.sources.base import BatchSource, Source
from surefoot.data.sources.datasets import (
    DatasetSource,
    SubsetSource,
    as_source,
    split_indices,
    split_source,
)
from surefoot.data.sources.stream import StreamSource

GOLDEN_SPLIT = [6, 11, 12, 16, 18]


class Squares:
    """A plain map-style dataset."""

    def __init__(self, length: int = 10, offset: int = 0) -> None:
        self.length = length
        self.offset = offset

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {"x": torch.tensor(float(index)), "y": index * index + self.offset}


class ManyAtOnce(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.calls.append(indices)
        return [self[index] for index in indices]


class Stream:
    def __iter__(self) -> Any:
        return iter([1])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    "arrays",
    [
        np.arange(12.0).reshape(6, 2),
        torch.arange(12).reshape(6, 2).to(torch.bfloat16),
        (np.arange(6, dtype=np.float32), torch.arange(6)),
        {"x": torch.ones(6, 2, 2), "y": np.arange(6) > 2},
    ],
    ids=["array", "tensor", "tuple", "mapping"],
)
def test_the_fast_way_gives_what_one_by_one_gives(arrays: Any) -> None:
    source = ArraySource(arrays)
    assert isinstance(source, BatchSource)
    indices = np.array([3, 0, 3, 5])
    fast = source.batch(indices)
    slow = source.collate([source[index] for index in indices.tolist()])
    assert hash_value(fast) == hash_value(slow)
    assert type(fast) is type(slow)


def test_arrays_are_not_copied_and_read_only_ones_are_taken() -> None:
    values = np.arange(6.0)
    source = ArraySource(values)
    values[0] = 7
    assert float(source[0]) == 7
    values.flags.writeable = False
    assert float(ArraySource(values)[0]) == 7
    big_endian = np.arange(3, dtype=">f4")
    assert ArraySource(big_endian)[2] == 2


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((np.zeros(3), np.zeros(4)), r"differ in length: \(float64\[3\], float64\[4\]\)"),
        (np.zeros((0, 3)), "has no samples"),
        ((), "has no samples"),
        (np.array(["a", "b"]), "not an array of numbers"),
        (np.float64(3), "not an array of numbers"),
        (torch.tensor(3.0), r"tensor float32\[\]"),
        (torch.zeros(3, device="meta"), "on meta"),
    ],
)
def test_what_is_no_array_is_refused(arrays: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArraySource(arrays)


def test_a_fingerprint_follows_the_data() -> None:
    def fingerprints() -> list[str]:
        base = torch.arange(6.0)
        changed = base.clone()
        changed[5] = 9
        return [
            ArraySource(data).fingerprint()
            for data in (base, changed, base.double(), base.reshape(6, 1), (base,), {"x": base})
        ]

    found = fingerprints()
    assert found == fingerprints()
    # A tuple of one array is the same data as the array.
    assert found[0] == found[4] and len(set(found)) == 5
    assert all(text.startswith("content:") for text in found)


def test_a_dataset_is_fingerprinted_by_its_samples() -> None:
    first = DatasetSource(Squares()).fingerprint()
    assert first.startswith("sampled:")
    assert DatasetSource(Squares()).fingerprint() == first
    assert DatasetSource(Squares(11)).fingerprint() != first
    assert DatasetSource(Squares(offset=1)).fingerprint() != first

    class Own(Squares):
        def fingerprint(self) -> str:
            return "mine"

    assert DatasetSource(Own()).fingerprint() == "own:mine"


def test_a_sample_that_cannot_be_read_is_named_by_the_fingerprint() -> None:
    class Torn(Squares):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise OSError("torn")
            return index

    with pytest.raises(DataError, match="reading sample 3 of heap failed: OSError: torn"):
        DatasetSource(Torn(), name="heap").fingerprint()


def test_a_random_dataset_has_one_fingerprint_and_leaves_no_trace() -> None:
    class Noise(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(3), np.random.rand()

    state = torch.get_rng_state()
    first = DatasetSource(Noise()).fingerprint()
    assert DatasetSource(Noise()).fingerprint() == first
    assert torch.equal(torch.get_rng_state(), state)


def test_values_of_every_kind_are_hashed() -> None:
    values = [
        1,
        1.0,
        True,
        None,
        "1",
        b"1",
        [1],
        (1,),
        {"a": 1},
        {"b": 1},
        torch.tensor(1),
        torch.tensor(1.0),
        np.array(1),
        np.float32(1),
        [[1], 1],
        [[1, 1]],
    ]
    assert len({hash_value(value) for value in values}) == len(values)
    assert hash_value({"a": 1, "b": 2}) == hash_value({"b": 2, "a": 1})
    assert hash_value(object()) == hash_value(object())


def test_sampled_indices_are_spread_and_hold_both_ends() -> None:
    assert sampled_indices(5) == [0, 1, 2, 3, 4]
    spread = sampled_indices(10_001)
    assert len(spread) == 64 and spread[0] == 0 and spread[-1] == 10_000


def test_datasets_are_read_many_at_once_where_they_can() -> None:
    dataset = ManyAtOnce()
    fetch = Fetcher(DatasetSource(dataset, is_random=False), lambda batch: 1.0, 0)
    data, _ = fetch(0, np.array([2, 5]))
    assert dataset.calls == [[2, 5]]
    assert data["y"].tolist() == [4, 25]
    with pytest.raises(DataError, match="reading sample 10 of ManyAtOnce failed: IndexError"):
        fetch(0, np.array([2, 10]))
    # A random dataset is read one by one, each sample under its own seed.
    dataset.calls.clear()
    Fetcher(DatasetSource(dataset), lambda batch: 1.0, 0)(0, np.array([2, 5]))
    assert dataset.calls == []


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(MissingDataError, match="Squares has no samples"):
        DatasetSource(Squares(0))
    with pytest.raises(DataError, match="generator is not a map-style dataset"):
        DatasetSource(i for i in range(3))


@pytest.mark.parametrize("fraction", [0.001, 0.2, 0.5, 0.999])
@pytest.mark.parametrize("num_samples", [2, 3, 100])
def test_a_split_is_complete_and_disjoint(num_samples: int, fraction: float) -> None:
    train, validation = split_indices(num_samples, fraction)
    assert train.size and validation.size
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(num_samples))
    assert validation.size == min(num_samples - 1, max(1, round(num_samples * fraction)))
    again = split_indices(num_samples, fraction)
    assert (again[0] == train).all() and (again[1] == validation).all()


def test_the_split_is_pinned() -> None:
    # A run's validation set never changes under it.
    assert split_indices(20, 0.25)[1].tolist() == GOLDEN_SPLIT


def test_impossible_splits_are_refused() -> None:
    assert split_indices(3, 0.0)[1].size == 0
    with pytest.raises(RequestError):
        split_indices(1, 0.5)
    for fraction in (-0.1, 1.0):
        with pytest.raises(RequestError):
            split_indices(10, fraction)


def test_parts_of_a_source_keep_its_ways() -> None:
    whole = ArraySource(torch.arange(10), "ten")
    train, validation = split_source(whole, 0.3)
    assert validation is not None and (len(train), len(validation)) == (7, 3)
    rows = [int(part[i]) for part in (train, validation) for i in range(len(part))]
    assert sorted(rows) == list(range(10))
    assert isinstance(train, SubsetSource) and isinstance(validation, BatchSource)
    assert validation.batch(np.array([2, 0])).tolist() == [int(validation[2]), int(validation[0])]
    assert validation.locate(1) == f"sample {int(validation[1])} of ten"
    assert train.fingerprint() != validation.fingerprint() != whole.fingerprint()
    assert split_source(whole, 0.0) == (whole, None)
    # A part of a random source is random, and has no way round its seeds.
    noisy = AugmentedSource(whole, lambda sample: sample)
    part = SubsetSource(noisy, np.array([4, 2]), "part")
    assert part.is_random and not hasattr(part, "batch")
    assert part.locate(0) == "sample 4 of ten"


def test_a_broken_sample_of_a_part_is_named_in_the_whole() -> None:
    class Torn(Squares):
        def __getitem__(self, index: int) -> Any:
            raise OSError("torn")

    part = SubsetSource(DatasetSource(Torn(), name="all"), np.array([8]), "all (part)")
    with pytest.raises(DataError) as caught:
        Fetcher(part, lambda batch: 1.0, 0)(0, np.array([0]))
    assert caught.value.where == "sample 0 of all (part) (sample 8 of all)"


def test_the_source_that_fits_is_chosen() -> None:
    source = ArraySource(torch.ones(3))
    assert as_source(source) is source
    assert type(as_source(torch.ones(3))) is ArraySource
    assert type(as_source((np.ones(3), torch.ones(3)))) is ArraySource
    assert type(as_source({"x": np.ones(3)})) is ArraySource
    assert type(as_source(TensorDataset(torch.ones(3), torch.ones(3)))) is ArraySource
    listed = as_source([(torch.ones(2), 1)])
    assert type(listed) is DatasetSource and not listed.is_random
    dataset = as_source(Squares(), "mine")
    assert type(dataset) is DatasetSource and dataset.is_random and dataset.name == "mine"
    assert type(as_source(Stream())) is StreamSource
    for nothing in (iter([1]), 3, {"a": 1}, (1, 2), {}):
        with pytest.raises(DataError, match="not a supported dataset"):
            as_source(nothing)


def test_sources_fit_the_protocol() -> None:
    for source in (ArraySource(torch.ones(3)), DatasetSource(Squares())):
        assert isinstance(source, Source)
    assert not isinstance(StreamSource(Stream()), Source)
