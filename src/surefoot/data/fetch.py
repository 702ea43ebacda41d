"""Turns one planned micro-batch into a collated batch and its weights, on the CPU.

The same function runs in the training process and in workers, so both give the same bits. Knows
nothing of order, devices or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from surefoot.core.batches import batch_of_samples
from surefoot.core.errors import DataError, SurefootError
from surefoot.core.interruption import RAISED_BY_USER_CODE
from surefoot.data.augment import DrawWatch, preserved_cpu_rng, seed_for_sample
from surefoot.data.batch import SINGLE_TERM, describe, is_aligned, map_tensors
from surefoot.data.order import IndexArray

SAME_LENGTH = "a data set keeps its length while a run reads it"
WeightFunction = Callable[[Any], float | Mapping[str, float]]


class Fetcher:
    """Reads and collates samples of one source.

    Args:
        source: a `Source`.
        weight: number of loss-bearing items of a collated CPU batch.
        seed: key of the randomness of samples.
    """

    def __init__(self, source: Any, weight: WeightFunction, seed: int) -> None:
        self.source = source
        self.weight = weight
        self.seed = seed
        self.reading: Sequence[int] = ()
        """Indices of the samples that are being read at this moment."""
        self._num_samples = len(source) if hasattr(source, "__len__") else 0
        self._watch: DrawWatch | None = DrawWatch() if source.is_random else None

    def __call__(self, epoch: int, indices: IndexArray) -> tuple[Any, dict[str, float]]:
        """Collated batch and its weights.

        Raises:
            DataError: a sample cannot be read, samples cannot be collated, or the weight is not a
                number >= 0; names the dataset and the sample ids.
        """
        try:
            return self._fetch_or_seed(epoch, indices)
        finally:
            self.reading = ()

    def _fetch_or_seed(self, epoch: int, indices: IndexArray) -> tuple[Any, dict[str, float]]:
        if not self.source.is_random:
            return self._fetch(indices)
        if self._watch is not None:
            found = self._watch.read(lambda: self._fetch_one_by_one(indices.tolist()))
            if found is not None:
                return found
            # From the first batch that draws a random number on, each sample is seeded.
            self._watch = None
        with preserved_cpu_rng():
            return self._fetch_one_by_one(
                indices.tolist(), lambda index: seed_for_sample(self.seed, epoch, index)
            )

    def _fetch(self, indices: IndexArray) -> tuple[Any, dict[str, float]]:
        source, ids = self.source, indices.tolist()
        batch_of = getattr(source, "batch", None)
        if batch_of is None:
            data = collated(source, self._read_many(ids), ids)
        else:
            self.reading = ids
            try:
                data = batch_of(indices)
            except SurefootError:
                raise
            except RAISED_BY_USER_CODE as error:
                raise self._failure(ids, error) from error
        data = aligned(data)
        return data, checked_weights(self.weight, data, source, ids)

    def _fetch_one_by_one(
        self, ids: list[int], seed_for: Callable[[int], None] = lambda index: None
    ) -> tuple[Any, dict[str, float]]:
        source, samples = self.source, []
        for index in ids:
            seed_for(index)
            samples.append(self._read(index))
        # What collation draws (a mask, a mix of samples) is keyed by the batch's first id.
        seed_for(ids[0])
        data = aligned(collated(source, samples, ids))
        return data, checked_weights(self.weight, data, source, ids)

    def _read_many(self, ids: list[int]) -> list[Any]:
        many = getattr(self.source, "samples", None)
        if many is not None:
            self.reading = ids
            try:
                return list(many(ids))
            except RAISED_BY_USER_CODE:
                # One by one, so that the error names the sample.
                pass
        return [self._read(index) for index in ids]

    def _read(self, index: int) -> Any:
        self.reading = (index,)
        try:
            return self.source[index]
        except RAISED_BY_USER_CODE as error:
            raise self._failure([index], error) from error

    def _failure(self, ids: list[int], error: BaseException) -> DataError:
        detail = f"{type(error).__name__}: {error}"
        rule, remedy = "every sample of a dataset can be read", "correct or remove the sample"
        if isinstance(error, SurefootError):
            detail, rule, remedy = error.what, error.rule or rule, error.remedy or remedy
        if self._num_samples and (now := len(self.source)) < self._num_samples:
            detail += f"; it had {self._num_samples} samples at the start, now {now}"
            rule, remedy = SAME_LENGTH, "give each run a copy of the data that nobody changes"
        place = place_of(self.source, ids)
        return DataError(f"reading {place} failed: {detail}", where=place, rule=rule, remedy=remedy)


def aligned(data: Any) -> Any:
    """The batch with each tensor's memory aligned to 64 bytes, as torch allocates it.

    Matrix libraries may sum in another order for other alignments, and batches come from NumPy,
    from messages and from torch: without this, the number of workers could change the last bit of
    a weight.
    """
    leaves = data if type(data) is tuple else data.values() if type(data) is dict else (data,)
    if all(type(leaf) is torch.Tensor and is_aligned(leaf) for leaf in leaves):
        return data  # The common case, and much cheaper than a traversal.
    return map_tensors(data, _aligned)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is not torch.strided or is_aligned(tensor) else tensor.clone()


def place_of(source: Any, ids: Sequence[int]) -> str:
    """Origin of samples for messages: dataset, ids and, for a single one, its file."""
    if len(ids) == 1:
        locate = getattr(source, "locate", None)
        origin = f" ({locate(ids[0])})" if locate is not None else ""
        return f"sample {ids[0]} of {source.name}{origin}"
    shown = ", ".join(map(str, ids[:16]))
    return f"samples {shown}{', …' if len(ids) > 16 else ''} of {source.name}"


def collated(source: Any, samples: Sequence[Any], ids: Sequence[int]) -> Any:
    """Collates samples into one batch.

    Raises:
        DataError: they cannot be collated; names shapes and ids.
    """
    try:
        return source.collate(samples)
    except SurefootError:
        raise
    except RAISED_BY_USER_CODE as error:
        shapes = "; ".join(
            f"sample {index}: {describe(sample)}"
            for index, sample in zip(ids[:8], samples, strict=False)
        )
        raise DataError(
            f"samples of {source.name} cannot be collated into one batch: {error}",
            where=shapes + ("; …" if len(samples) > 8 else ""),
            rule="the samples of a micro-batch have equal types and shapes",
            remedy="use surefoot.DatasetSource(dataset, collate=surefoot.PaddingCollate()), or a "
            "collate function of your own",
        ) from error


def checked_weights(
    weight: WeightFunction, data: Any, source: Any, ids: Sequence[int]
) -> dict[str, float]:
    """Weights of a CPU batch as a mapping, checked.

    Raises:
        DataError: the batch is not what the task expects, or a weight is not a number >= 0; names
            the sample if possible.
    """
    try:
        with batch_of_samples(len(ids)):
            value = weight(data)
    except DataError as error:
        position = getattr(error, "batch_position", None)
        if isinstance(position, int) and position < len(ids):
            ids = [ids[position]]
        place = place_of(source, ids)
        error.where = f"{place}: {error.where}" if error.where else place
        raise
    except RAISED_BY_USER_CODE as error:
        raise DataError(
            f"the weight of a batch could not be computed: {type(error).__name__}: {error}",
            where=f"{place_of(source, ids)}: {describe(data)}",
            rule="weight(batch) accepts every collated batch, on the CPU",
        ) from error
    weights = dict(value) if isinstance(value, Mapping) else {SINGLE_TERM: value}
    for term, number in weights.items():
        weights[term] = number = float(number)
        if not 0.0 <= number < float("inf"):
            raise DataError(
                f"the weight of a batch is {number} ({term})",
                where=place_of(source, ids),
                rule="a weight is a finite number >= 0",
            )
    return weights
