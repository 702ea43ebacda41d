"""The protocol of a data source: samples by index, without any order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from surefoot.data.order import IndexArray


@runtime_checkable
class Source(Protocol):
    """Samples by index.

    Optional methods:

    - `batch(indices)`: the collated batch of many samples, used if no sample is random;
    - `samples(indices)`: many samples at once, used likewise;
    - `locate(index)`: the origin of a sample, such as its file, for messages.

    >>> from surefoot.data.sources.datasets import as_source
    >>> isinstance(as_source([1.0, 2.0]), Source)
    True
    """

    @property
    def name(self) -> str:
        """Name of this dataset in messages."""

    @property
    def is_random(self) -> bool:
        """Whether reading a sample draws random numbers.

        If so, each sample is read separately under a seed of (seed, epoch, sample id). A source
        that returns False but draws anyway disturbs the random numbers of the training.
        """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def collate(self, samples: Sequence[Any]) -> Any:
        """Collates samples into one batch."""

    def fingerprint(self) -> str:
        """Text that changes when the data changes."""


@runtime_checkable
class BatchSource(Source, Protocol):
    """A source that collates many samples at once."""

    def batch(self, indices: IndexArray) -> Any:
        """The collated batch of `indices`, in order."""


@dataclass(frozen=True)
class DataSplits:
    """What a recipe's data section opens: one training set and any number of validation sets."""

    train: Any
    validation: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that a model takes from its data, keyed by the model's field names."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a run records about its data: counts, statistics, skipped files. JSON values only."""


def hash_parts(*parts: bytes | str | int) -> str:
    """Hex digest of several parts; the boundaries between them matter."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
