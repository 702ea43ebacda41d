"""Sources from map-style datasets, subsets of a source, and the source for an arbitrary object.

Wraps; copies no sample and never changes what a dataset returns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from surefoot.core.errors import DataError, MissingDataError, RequestError, SurefootError
from surefoot.core.interruption import RAISED_BY_USER_CODE
from surefoot.data.augment import preserved_cpu_rng, seed_for_sample
from surefoot.data.collate import collate_samples
from surefoot.data.fingerprint import hash_value, sampled_indices
from surefoot.data.order import IndexArray, permuted_indices
from surefoot.data.sources.arrays import ArraySource
from surefoot.data.sources.base import Source, hash_parts
from surefoot.data.sources.stream import StreamSource, is_stream

# Key of every split by index: a constant, so that a split does not depend on the run's seed.
_SPLIT_KEY = 0x5EED_0F_5B117


class DatasetSource:
    """A map-style dataset: `len(dataset)` and `dataset[index]`.

    Args:
        dataset: the dataset. If it has `__getitems__(indices)` and `is_random` is False, many
            samples are read at once.
        name: used in messages; default: the class name.
        collate: collates samples; default: `collate_samples`.
        is_random: whether reading a sample draws random numbers, as augmentation does. True is
            always correct; False saves seeding for each sample.

    Raises:
        DataError: it has no length or no access by index.
        MissingDataError: it is empty.

    >>> source = DatasetSource([(torch.zeros(2), 0), (torch.ones(2), 1)], name="two")
    >>> source, source.collate([source[0], source[1]])[1].tolist()
    (DatasetSource('two', 2 samples), [0, 1])
    """

    def __init__(
        self,
        dataset: Any,
        *,
        name: str = "",
        collate: Callable[[Any], Any] = collate_samples,
        is_random: bool = True,
    ) -> None:
        self.dataset = dataset
        self.name = name or type(dataset).__name__
        self.is_random = is_random
        self._collate = collate
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"{self.name} is not a map-style dataset",
                rule="a map-style dataset has __len__ and __getitem__",
                remedy="add them, or give an iterable dataset state_dict and load_state_dict",
            )
        if len(dataset) == 0:
            raise MissingDataError(f"{self.name} has no samples", rule="at least one sample")
        self._many = None if is_random else getattr(dataset, "__getitems__", None)

    def __repr__(self) -> str:
        return f"DatasetSource({self.name!r}, {len(self):,} samples)"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Samples of several indices."""
        if self._many is not None:
            return list(self._many(list(indices)))
        return [self.dataset[index] for index in indices]

    def collate(self, samples: Sequence[Any]) -> Any:
        return self._collate(samples)

    def fingerprint(self) -> str:
        """The dataset's own `fingerprint()`, or else a hash of its length and 64 of its samples.

        The latter begins with `sampled:`; it misses a change in a sample that it does not read.
        """
        own = getattr(self.dataset, "fingerprint", None)
        if callable(own):
            return f"own:{own()}"
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{type(self.dataset).__qualname__} {len(self)}".encode())
        with preserved_cpu_rng():
            for index in sampled_indices(len(self)):
                seed_for_sample(0, 0, index)
                try:
                    hash_value(self.dataset[index], digest)
                except SurefootError:
                    raise
                except RAISED_BY_USER_CODE as error:
                    raise DataError(
                        f"reading sample {index} of {self.name} failed: "
                        f"{type(error).__name__}: {error}",
                        where=f"{self.name}, sample {index}",
                        rule="every sample of a dataset can be read",
                    ) from error
        return f"sampled:{digest.hexdigest()}"


class SubsetSource:
    """Some samples of a source, reindexed from 0.

    Args:
        source: the full source.
        indices: int64 [samples], indices into it.
        name: used in messages.
    """

    def __init__(self, source: Source, indices: IndexArray, name: str) -> None:
        self.name = name
        self.is_random = source.is_random
        self._source = source
        self._indices = np.asarray(indices, dtype=np.int64)
        batch = getattr(source, "batch", None)
        if batch is not None:
            self.batch = _SubsetBatch(batch, self._indices)

    def __repr__(self) -> str:
        return f"SubsetSource({self.name!r}, {len(self):,} samples)"

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._source[int(self._indices[index])]

    def collate(self, samples: Sequence[Any]) -> Any:
        return self._source.collate(samples)

    def locate(self, index: int) -> str:
        """Origin of a sample, for messages."""
        original = int(self._indices[index])
        inner = getattr(self._source, "locate", None)
        return inner(original) if inner else f"sample {original} of {self._source.name}"

    def fingerprint(self) -> str:
        """Hash of the full source's fingerprint and the chosen indices."""
        kind, _, text = self._source.fingerprint().partition(":")
        return f"{kind}:{hash_parts(text, self._indices.tobytes())}"


class _SubsetBatch:
    """`batch` of a subset. A class, not a closure, so that it can be sent to a spawned worker."""

    def __init__(self, batch: Callable[[IndexArray], Any], indices: IndexArray) -> None:
        self._batch = batch
        self._indices = indices

    def __call__(self, indices: IndexArray) -> Any:
        return self._batch(self._indices[indices])


def split_indices(num_samples: int, validation_fraction: float) -> tuple[IndexArray, IndexArray]:
    """Indices of the training and validation part, both ascending.

    The split depends on the two arguments alone: it is the same in every run and on every platform.
    If the fraction is above 0, each part has at least one sample.

    Raises:
        RequestError: the fraction is not in [0, 1), or one sample cannot be split.
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise RequestError(
            f"validation_fraction is {validation_fraction}",
            where="data.validation_fraction",
            rule="0 <= validation_fraction < 1",
        )
    if validation_fraction == 0.0:
        return np.arange(num_samples, dtype=np.int64), np.empty(0, dtype=np.int64)
    if num_samples < 2:
        raise RequestError(
            f"{num_samples} sample(s) cannot be split",
            where="data.validation_fraction",
            rule="a split needs at least two samples",
            remedy="set data.validation_fraction to 0",
        )
    held_out = min(num_samples - 1, max(1, round(num_samples * validation_fraction)))
    order = permuted_indices(_SPLIT_KEY, 0, np.arange(num_samples), num_samples)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def split_source(source: Source, validation_fraction: float) -> tuple[Source, Source | None]:
    """Training and validation part of a source (see `split_indices`); None if none is held out.

    Augmentation belongs after the split: `AugmentedSource(train, transform)`.
    """
    train, validation = split_indices(len(source), validation_fraction)
    if not validation.size:
        return source, None
    return (
        SubsetSource(source, train, f"{source.name} (training part)"),
        SubsetSource(source, validation, f"{source.name} (validation part)"),
    )


def as_source(data: Any, name: str = "") -> Any:
    """The source for what a user passes.

    A source is returned unchanged. An array or tensor, or a tuple or mapping of them, becomes an
    `ArraySource`; so does a `TensorDataset`. A list is a list of samples. A map-style dataset
    becomes a `DatasetSource`; an iterable with `state_dict` and `load_state_dict` a `StreamSource`.

    Raises:
        DataError: it is none of these.
    """
    if isinstance(data, (Source, StreamSource)):
        return data
    if isinstance(data, TensorDataset):
        return ArraySource(tuple(data.tensors), name or "TensorDataset")
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return ArraySource(data, name or "arrays")
    if isinstance(data, (tuple, Mapping)):
        parts = data.values() if isinstance(data, Mapping) else data
        if parts and all(isinstance(part, (torch.Tensor, np.ndarray)) for part in parts):
            return ArraySource(data, name or "arrays")
    if isinstance(data, list):
        return DatasetSource(data, name=name or "list of samples", is_random=False)
    if is_stream(data):
        return StreamSource(data, name=name)
    by_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if by_index and not isinstance(data, (Mapping, tuple)):
        return DatasetSource(data, name=name)
    if isinstance(data, DataLoader):
        raise DataError(
            "a DataLoader has already batched and shuffled",
            where=name,
            rule="surefoot draws the samples, so that a resumed run sees the same ones",
            remedy="pass loader.dataset; its batch size is train.micro_batch, its workers "
            "loader.workers, its collate_fn surefoot.DatasetSource(dataset, collate=...)",
        )
    raise DataError(
        f"{type(data).__name__} is not a supported dataset",
        rule="arrays, a dataset with __len__ and __getitem__, or an iterable with state_dict and "
        "load_state_dict",
        remedy="add these methods, so that a run can continue where it stopped",
    )
