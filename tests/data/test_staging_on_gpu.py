"""Batches on a CUDA device: the right values, copied beside the computation, never overwritten."""

from __future__ import annotations

import itertools
from collections import UserDict
from typing import Any

import pytest
import torch

from surefoot.core.errors import DataError
from surefoot.data.loader import Loader, LoaderSettings
from surefoot.data.order import IN_ORDER, BatchPlan
from surefoot.data.sources.arrays import ArraySource
from surefoot.data.sources.datasets import DatasetSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def count(batch: Any) -> float:
    return 1.0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin_memory", ["auto", "off"])
def test_values_arrive_while_the_device_is_busy(workers: int, pin_memory: Any) -> None:
    rows = torch.arange(64, dtype=torch.float32)[:, None].expand(64, 1 << 18).contiguous()
    settings = LoaderSettings(workers=workers, pin_memory=pin_memory)
    with Loader(
        ArraySource(rows), BatchPlan(64, 4, seed=1), weight=count, settings=settings, device="cuda"
    ) as loader:
        sums, expected = [], []
        for batch in itertools.islice(loader.iterate(), 64):
            assert batch.data.is_cuda
            # The device lags far behind the host: memory that is given back too early is
            # overwritten by a later copy before it is read.
            torch.cuda._sleep(3_000_000)
            sums.append(batch.data.double().mean(dim=1))
            expected.append(list(batch.ids))
            del batch
        assert torch.stack(sums).tolist() == expected


@pytest.mark.parametrize("columns", [4, 1 << 18])
def test_a_late_copy_is_waited_for_and_an_early_use_is_not(columns: int) -> None:
    rows = torch.arange(1.0, 9.0)[:, None].expand(8, columns).contiguous()
    loader = Loader(ArraySource(rows), BatchPlan(8, 2, seed=1), weight=count, device="cuda")
    assert loader._stage is not None
    batches = loader.iterate()
    next(batches)
    with torch.cuda.stream(loader._stage._stream):
        torch.cuda._sleep(200_000_000)
    # This batch was sent before the delay, the next one behind it.
    next(batches)
    batch = next(batches)
    assert batch.data.double().mean(dim=1).tolist() == [index + 1 for index in batch.ids]


def test_small_batches_do_not_wait_for_the_device() -> None:
    source = ArraySource(torch.arange(64.0)[:, None].expand(64, 16).contiguous())
    batches = Loader(source, BatchPlan(64, 4, seed=1), weight=count, device="cuda").iterate()
    next(batches)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.Event()
    done.record()
    found = [next(batches) for _ in range(32)]
    assert not done.query(), "the host went ahead while the device was busy"
    for batch in found:
        assert batch.data[:, 0].tolist() == list(batch.ids)


def test_copies_run_on_their_own_stream_from_pinned_memory() -> None:
    loader = Loader(
        ArraySource(torch.ones(8, 1 << 18)), BatchPlan(8, 2), weight=count, device="cuda"
    )
    assert loader._stage is not None
    assert loader._stage._stream != torch.cuda.current_stream()
    next(loader.iterate())
    statistics = torch.cuda.host_memory_stats()
    assert statistics["allocated_bytes.peak"] > 0 or statistics["allocation.peak"] > 0


class Graph:
    """Hides its tensor behind a `.to` of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: Any) -> Graph:
        return Graph(self.tensor.to(device))


class Encoding(UserDict[str, torch.Tensor]):
    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.data.items()})


@pytest.mark.parametrize("columns", [4, 1 << 18])
def test_every_container_arrives(columns: int) -> None:
    def collate(samples: list[int]) -> dict[str, Any]:
        tensor = torch.tensor(samples)[:, None].expand(2, columns).contiguous()
        return {"graph": Graph(tensor), "encoding": Encoding({"x": tensor}), "list": [tensor, "s"]}

    source = DatasetSource(list(range(8)), collate=collate, is_random=False)
    loader = Loader(source, BatchPlan(8, 2, order=IN_ORDER), weight=count, device="cuda")
    for index, batch in enumerate(loader.iterate_once()):
        wanted = [2 * index, 2 * index + 1]
        data = batch.data
        for tensor in (data["graph"].tensor, data["encoding"]["x"], data["list"][0]):
            assert tensor.is_cuda and tensor[:, -1].tolist() == wanted
        assert data["list"][1] == "s"


def test_what_was_loaded_before_a_failure_is_handed_out_first() -> None:
    class Torn:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5:
                raise OSError("torn")
            return torch.tensor(index)

    loader = Loader(
        DatasetSource(Torn()), BatchPlan(8, 2, order=IN_ORDER), weight=count, device="cuda"
    )
    seen = []
    with pytest.raises(DataError, match="sample 5"):
        for batch in loader.iterate():
            seen.append(batch.data.tolist())
    assert seen == [[0, 1], [2, 3]]


def test_no_random_number_of_the_device_is_drawn() -> None:
    state = torch.cuda.get_rng_state()
    source = DatasetSource([torch.ones(2)] * 8, is_random=True)
    loader = Loader(source, BatchPlan(8, 2), weight=count, device="cuda")
    assert len(list(loader.iterate_once())) == 4
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_device_memory_does_not_grow() -> None:
    source = ArraySource(torch.ones(16, 1 << 20))
    loader = Loader(source, BatchPlan(16, 1), weight=count, device="cuda")
    batches = loader.iterate()
    for _ in itertools.islice(batches, 8):
        pass
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in itertools.islice(batches, 64):
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before
