"""The loader: the same bits for any workers and any start, and no trace in global random state."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import random
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError, RequestError
from surefoot.data.augment import AugmentedSource
from surefoot.data.batch import MicroBatch
from surefoot.data.loader import Loader, LoaderSettings
from surefoot.data.order import IN_ORDER, BatchPlan, Cursor, position_of
from surefoot.data.sources.arrays import ArraySource
from surefoot.data.sources.datasets import DatasetSource
from surefoot.data.sources.stream import StreamCursor

NUM_SAMPLES = 23


def count(batch: Any) -> float:
    return float(len(batch[0]))


def arrays() -> ArraySource:
    inputs = np.arange(NUM_SAMPLES * 3, dtype=np.float32).reshape(NUM_SAMPLES, 3)
    return ArraySource((inputs, np.arange(NUM_SAMPLES)), "numbers")


def noisy(sample: Any) -> Any:
    """Draws from all three global generators."""
    inputs, target = sample
    noise = random.random() + np.random.rand() + float(torch.rand(()))
    return inputs + noise, target


def plan(**fields: Any) -> BatchPlan:
    return BatchPlan(**{"num_samples": NUM_SAMPLES, "micro_batch": 3, "seed": 5, **fields})


def content(batch: MicroBatch) -> tuple[Any, ...]:
    """Everything of a micro-batch, as values that `==` compares bit for bit."""
    data = tuple(tensor.numpy().tobytes() for tensor in batch.data)
    return (
        data,
        dict(batch.weights),
        batch.samples,
        batch.ids,
        batch.cursor_after,
        batch.ends_window,
        batch.ends_epoch,
        batch.epoch,
    )


def global_state() -> tuple[Any, ...]:
    return (
        random.getstate(),
        pickle.dumps(np.random.get_state()),
        torch.get_rng_state().numpy().tobytes(),
    )


@pytest.fixture(params=["arrays", "random", "one by one"])
def source(request: pytest.FixtureRequest) -> Any:
    if request.param == "arrays":
        return arrays()
    if request.param == "random":
        return AugmentedSource(arrays(), noisy)
    whole = arrays()
    return DatasetSource([whole[i] for i in range(NUM_SAMPLES)], is_random=False)


def take(loader: Loader, number: int, cursor: Any = Cursor()) -> list[tuple[Any, ...]]:  # noqa: B008
    with closing(loader.iterate(cursor)) as batches:
        return [content(batch) for batch in itertools.islice(batches, number)]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_no_bit(source: Any, workers: int) -> None:
    settings = LoaderSettings(workers=workers, prefetch=2)
    with (
        Loader(source, plan(window_length=2), weight=count) as alone,
        Loader(source, plan(window_length=2), weight=count, settings=settings) as many,
    ):
        # Across two epoch borders.
        assert take(many, 20) == take(alone, 20)
        assert take(many, 9, Cursor(1, 6)) == take(alone, 9, Cursor(1, 6))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_cursor_continues_the_same_batches(source: Any, workers: int) -> None:
    with Loader(
        source, plan(window_length=2), weight=count, settings=LoaderSettings(workers=workers)
    ) as loader:
        whole = take(loader, 18)
        for stop in (0, 1, 7, 8, 15):
            cursor = whole[stop][4]
            assert take(loader, 17 - stop, cursor) == whole[stop + 1 :]
            assert take(loader, 1, cursor.as_json()) == whole[stop + 1 : stop + 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_state_is_untouched(source: Any, workers: int) -> None:
    with Loader(source, plan(), weight=count, settings=LoaderSettings(workers=workers)) as loader:
        before = global_state()
        with closing(loader.iterate()) as batches:
            for batch in itertools.islice(batches, 10):
                assert batch.samples
                assert global_state() == before
        assert global_state() == before
        assert sum(batch.samples for batch in loader.iterate_once()) == NUM_SAMPLES
        assert global_state() == before


def test_global_random_state_does_not_reach_samples() -> None:
    loader = Loader(AugmentedSource(arrays(), noisy), plan(), weight=count)
    random.seed(1)
    torch.manual_seed(1)
    first = take(loader, 5)
    random.seed(2)
    torch.manual_seed(2)
    assert take(loader, 5) == first


def test_the_state_returns_after_a_failing_sample() -> None:
    def fail(sample: Any) -> Any:
        noisy(sample)
        raise OSError("gone")

    before = global_state()
    with pytest.raises(DataError):
        take(Loader(AugmentedSource(arrays(), fail), plan(), weight=count), 1)
    assert global_state() == before


def test_randomness_belongs_to_seed_epoch_and_sample() -> None:
    def drawn(epoch: int, **fields: Any) -> dict[int, bytes]:
        loader = Loader(AugmentedSource(arrays(), noisy), plan(**fields), weight=count)
        found = {}
        for batch in loader.iterate_once(Cursor(epoch, 0)):
            for row, index in enumerate(batch.ids):
                found[index] = batch.data[0][row].numpy().tobytes()
        return found

    reference = drawn(0)
    # Another order, another batch size: the same sample looks the same.
    assert drawn(0, order=IN_ORDER) == reference
    assert drawn(0, micro_batch=7) == reference
    other_epoch, other_seed = drawn(1), drawn(0, seed=6)
    assert all(reference[i] != other_epoch[i] != other_seed[i] for i in range(NUM_SAMPLES))
    # Samples differ from each other too: the noise is not one value for all.
    plain = arrays()
    noise = {
        round(float(torch.frombuffer(bytearray(data), dtype=torch.float32)[0] - plain[i][0][0]), 4)
        for i, data in reference.items()
    }
    assert len(noise) > NUM_SAMPLES // 2


def test_one_pass_is_exact_and_can_be_repeated() -> None:
    loader = Loader(arrays(), plan(order=IN_ORDER, micro_batch=4), weight=count)
    first = [content(batch) for batch in loader.iterate_once()]
    assert [ids for *_, ids, _, _, _, _ in first] == [
        tuple(range(i, min(i + 4, NUM_SAMPLES))) for i in range(0, NUM_SAMPLES, 4)
    ]
    assert [content(batch) for batch in loader.iterate_once()] == first
    assert first[-1][6] and not first[-2][6]


def test_workers_stay_over_whole_passes_and_go_after_a_broken_one() -> None:
    settings = LoaderSettings(workers=2)
    with Loader(arrays(), plan(), weight=count, settings=settings) as loader:
        list(loader.iterate_once())
        workers = {process.pid for process in multiprocessing.active_children()}
        assert len(workers) == 2
        list(loader.iterate_once())
        assert {process.pid for process in multiprocessing.active_children()} == workers
        take(loader, 2)
        assert multiprocessing.active_children() == []
        list(loader.iterate_once())
    assert multiprocessing.active_children() == []


def test_a_rank_that_ran_out_gets_a_batch_without_weight() -> None:
    fields = {"num_samples": 5, "micro_batch": 2, "num_ranks": 4}
    inputs = ArraySource((torch.arange(5.0)[:, None], torch.arange(5)))
    batch = next(Loader(inputs, plan(**fields, rank=3), weight=count).iterate())
    first = next(Loader(inputs, plan(**fields, rank=0), weight=count).iterate())
    assert batch.weights == {"loss": 0.0} and batch.samples == 0 and batch.ids == ()
    assert batch.data[0].shape == (1, 1) and batch.data[0][0] == first.data[0][0]
    assert batch.cursor_after == first.cursor_after


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("width", [5, 4_000])
def test_memory_is_aligned_wherever_it_comes_from(workers: int, width: int) -> None:
    # Matrix libraries may give other last bits where it is not.
    def collate(samples: list[int]) -> dict[str, Any]:
        memory = np.zeros(len(samples) * width + 1, dtype=np.float32)
        return {"odd": torch.from_numpy(memory[1:]), "even": torch.ones(width), "text": "x"}

    source = DatasetSource([0] * NUM_SAMPLES, collate=collate, is_random=False)
    settings = LoaderSettings(workers=workers)
    with Loader(source, plan(), weight=lambda batch: 1.0, settings=settings) as loader:
        for batch in loader.iterate_once():
            assert batch.data["odd"].data_ptr() % 64 == 0
            assert batch.data["even"].data_ptr() % 64 == 0


def test_weights_by_term_are_kept() -> None:
    loader = Loader(arrays(), plan(), weight=lambda batch: {"a": 2, "b": 0.5})
    assert next(loader.iterate()).weights == {"a": 2.0, "b": 0.5}


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(DataError, match="weight of a batch is") as caught:
        next(Loader(arrays(), plan(), weight=lambda batch: value).iterate())
    assert "of numbers" in caught.value.where


def test_batches_reach_a_device_of_any_kind() -> None:
    batch = next(Loader(arrays(), plan(), weight=count, device="meta").iterate())
    assert all(tensor.is_meta for tensor in batch.data)
    assert batch.weights == {"loss": 3.0} and batch.samples == 3


def test_a_batch_that_cannot_be_read_at_once_names_its_samples() -> None:
    class Torn(ArraySource):
        def batch(self, indices: Any) -> Any:
            raise OSError("torn")

    with pytest.raises(DataError, match="reading samples 0, 1, 2 of torn failed: OSError: torn"):
        next(
            Loader(Torn(np.zeros(NUM_SAMPLES), "torn"), plan(order=IN_ORDER), weight=len).iterate()
        )


def test_one_reader_at_a_time() -> None:
    loader = Loader(arrays(), plan(), weight=count)
    first = loader.iterate()
    next(first)
    with pytest.raises(RequestError, match="already being read"):
        next(loader.iterate())
    first.close()
    next(loader.iterate())


@pytest.mark.parametrize(
    "fields",
    [{"workers": -1}, {"prefetch": 0}, {"deadline_seconds": 0.0}, {"deadline_seconds": 1e999}],
)
def test_impossible_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        LoaderSettings(**fields)


def test_a_plan_of_another_length_is_refused() -> None:
    with pytest.raises(RequestError, match="orders 24 samples"):
        Loader(arrays(), plan(num_samples=24), weight=count)


def test_pinned_memory_needs_cuda() -> None:
    with pytest.raises(RequestError, match="pinned"):
        Loader(arrays(), plan(), weight=count, settings=LoaderSettings(pin_memory="on"))


def test_the_state_of_a_stream_does_not_fit_a_dataset_by_index() -> None:
    loader = Loader(arrays(), plan(), weight=count)
    for cursor in (StreamCursor(0, 3, {}), {"epoch": 0, "position": 3, "state": {}}):
        with pytest.raises(RequestError, match="cursor of a stream"):
            next(loader.iterate(cursor))
    assert position_of({"epoch": 1, "position": 3}) == Cursor(1, 3)


class Broken:
    """Sample 7 cannot be read, sample 11 has another shape."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise ValueError("torn file")
        return torch.zeros(3 if index != 11 else 4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_random", [False, True])
def test_a_broken_sample_is_named(workers: int, is_random: bool) -> None:
    source = DatasetSource(Broken(), name="heap", is_random=is_random)
    settings = LoaderSettings(workers=workers)
    with Loader(
        source, plan(order=IN_ORDER), weight=lambda batch: 1.0, settings=settings
    ) as loader:
        with pytest.raises(DataError) as caught:
            list(loader.iterate_once())
        assert caught.value.what == "reading sample 7 of heap failed: ValueError: torn file"
        assert caught.value.where == "sample 7 of heap"
        if workers:
            assert "torn file" in caught.value.__notes__[0]
            assert "in __getitem__" in caught.value.__notes__[0]
        with pytest.raises(DataError) as caught:
            list(loader.iterate_once(Cursor(0, 9)))
        assert "of heap cannot be collated into one batch" in caught.value.what
        assert "sample 9: float32[3]; sample 10: float32[3]; sample 11: float32[4]" in str(
            caught.value
        )


def test_an_error_of_the_weight_names_the_sample() -> None:
    def weight(batch: Any) -> float:
        error = DataError("target holds 12", where="batch position 1")
        error.batch_position = 1
        raise error

    with pytest.raises(DataError) as caught:
        next(Loader(arrays(), plan(order=IN_ORDER), weight=weight).iterate(Cursor(0, 3)))
    assert caught.value.where == "sample 4 of numbers: batch position 1"

    def crash(batch: Any) -> float:
        return batch["labels"]

    with pytest.raises(DataError, match="could not be computed: TypeError") as caught:
        next(Loader(arrays(), plan(), weight=crash).iterate())
    assert "(float32[3, 3], int64[3])" in caught.value.where


def test_a_batch_that_cannot_travel_is_reported() -> None:
    source = DatasetSource([0] * NUM_SAMPLES, collate=lambda samples: lambda: samples)
    settings = LoaderSettings(workers=1)
    with (
        Loader(source, plan(), weight=lambda batch: 1.0, settings=settings) as loader,
        pytest.raises(DataError, match="could not be sent from its worker"),
    ):
        next(loader.iterate())


def test_what_was_loaded_before_a_failure_is_handed_out_first() -> None:
    settings = LoaderSettings(workers=2, prefetch=3)
    source = DatasetSource(Broken(), is_random=False)
    with Loader(
        source, plan(order=IN_ORDER), weight=lambda batch: 1.0, settings=settings
    ) as loader:
        ids = []
        with pytest.raises(DataError, match="sample 7"):
            for batch in loader.iterate():
                ids.append(batch.ids)
        assert ids == [(0, 1, 2), (3, 4, 5)]


class Leaves:
    """Ends the process, so it thinks, at one sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise SystemExit(0)
        return torch.zeros(3), index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_random", [True, False])
def test_an_exit_in_a_data_set_is_an_error_that_names_the_sample(
    workers: int, is_random: bool
) -> None:
    source = DatasetSource(Leaves(), is_random=is_random)
    settings = LoaderSettings(workers=workers)
    with (
        Loader(source, plan(), weight=count, settings=settings) as loader,
        pytest.raises(DataError, match=r"sample 7 of Leaves failed: SystemExit: 0"),
    ):
        list(loader.iterate_once())


def leave(*_: Any) -> Any:
    raise SystemExit


@pytest.mark.parametrize(
    ("collate", "weight", "said"),
    [
        (leave, count, "cannot be collated into one batch"),
        (torch.stack, leave, "the weight of a batch could not be computed: SystemExit"),
    ],
)
def test_an_exit_in_a_collate_or_weight_function_is_an_error(
    collate: Any, weight: Any, said: str
) -> None:
    source = DatasetSource([torch.zeros(2)] * NUM_SAMPLES, collate=collate)
    with Loader(source, plan(), weight=weight) as loader, pytest.raises(DataError, match=said):
        list(loader.iterate_once())


class Shrinks(list[Any]):
    """Loses samples once so many were read."""

    def __init__(self, after: int) -> None:
        super().__init__([torch.zeros(2)] * NUM_SAMPLES)
        self.left = after

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        self.left -= 1
        if self.left == 0:
            del self[-5:]
        return sample


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (3, r"reading sample \d+ of Shrinks failed: IndexError.* 23 samples at the start, now 18"),
        (NUM_SAMPLES, "Shrinks had 23 samples at the start and has 18 now, in epoch 1"),
    ],
)
def test_a_data_set_that_shrinks_is_reported(after: int, said: str) -> None:
    source = DatasetSource(Shrinks(after), is_random=False)
    with (
        Loader(source, plan(order=IN_ORDER), weight=len) as loader,
        pytest.raises(DataError, match=said) as caught,
    ):
        list(itertools.islice(loader.iterate(), 20))
    assert "keeps its length" in caught.value.rule


def test_the_loader_says_which_sample_it_is_reading() -> None:
    seen = []

    class Asks:
        def __len__(self) -> int:
            return NUM_SAMPLES

        def __getitem__(self, index: int) -> Any:
            seen.append(loader.reading)
            return torch.zeros(2)

    loader = Loader(DatasetSource(Asks()), plan(order=IN_ORDER), weight=len)
    with closing(loader.iterate_once()) as batches:
        next(batches)
    assert seen == ["sample 0 of Asks", "sample 1 of Asks", "sample 2 of Asks"]
    assert loader.reading == ""
