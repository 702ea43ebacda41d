"""Arrays and tensors that fit in memory, indexed along their first dimension.

Reads a whole micro-batch at once. Copies nothing when opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.core.errors import DataError, MissingDataError
from surefoot.data.batch import describe
from surefoot.data.order import IndexArray


class ArraySource:
    """Samples from arrays of equal length.

    Args:
        arrays: one array or tensor, a tuple of them, or a mapping of names to them; each of shape
            [samples, ...]. A batch has the same structure.
        name: used in messages.

    Raises:
        MissingDataError: there are no samples.
        DataError: the first dimensions differ, or something is not an array.
    """

    def __init__(self, arrays: Any, name: str = "arrays") -> None:
        self.name = name
        self.is_random = False
        self._keys: tuple[Any, ...] | None = None
        if isinstance(arrays, Mapping):
            self._keys = tuple(arrays)
            parts = list(arrays.values())
        else:
            parts = list(arrays) if isinstance(arrays, (tuple, list)) else [arrays]
        self._single = not isinstance(arrays, (Mapping, tuple, list))
        self._tensors = tuple(_as_tensor(part, name) for part in parts)
        lengths = {len(tensor) for tensor in self._tensors}
        if len(lengths) > 1:
            raise DataError(
                f"the arrays of {name} differ in length: {describe(arrays)}",
                rule="all arrays have the same first dimension, the number of samples",
            )
        if not lengths or lengths == {0}:
            raise MissingDataError(f"{name} has no samples", rule="at least one sample")

    def __repr__(self) -> str:
        return f"ArraySource({self.name!r}, {len(self):,} samples)"

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Any:
        return self._arrange([tensor[index] for tensor in self._tensors])

    def batch(self, indices: IndexArray) -> Any:
        """The batch of `indices`: tensors [len(indices), ...]."""
        rows = torch.from_numpy(indices)
        return self._arrange([tensor.index_select(0, rows) for tensor in self._tensors])

    def collate(self, samples: Sequence[Any]) -> Any:
        """Stacks samples of this source."""
        if self._single:
            return torch.stack(list(samples))
        if self._keys is not None:
            return {key: torch.stack([sample[key] for sample in samples]) for key in self._keys}
        return tuple(torch.stack(column) for column in zip(*samples, strict=True))

    def fingerprint(self) -> str:
        """Hash of all values, types and shapes."""
        digest = hashlib.blake2b(digest_size=16)
        for key, tensor in zip(self._keys or self._tensors, self._tensors, strict=True):
            label = key if self._keys is not None else ""
            digest.update(f"{label}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            data: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            digest.update(data)
        return f"content:{digest.hexdigest()}"

    def _arrange(self, parts: list[Tensor]) -> Any:
        if self._single:
            return parts[0]
        return tuple(parts) if self._keys is None else dict(zip(self._keys, parts, strict=True))


def _as_tensor(part: Any, name: str) -> Tensor:
    if isinstance(part, Tensor):
        tensor = part.detach()
    else:
        array = np.asarray(part)
        if array.dtype.kind not in "biuf" or not array.ndim:
            raise DataError(
                f"{name} holds {describe(part)}, which is not an array of numbers",
                rule="numbers or booleans of shape [samples, ...]",
            )
        if not array.flags.writeable or not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="), copy=True)
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dim() == 0 or tensor.device.type != "cpu":
        raise DataError(
            f"{name} holds a tensor {describe(part)} on {tensor.device}",
            rule="tensors of shape [samples, ...] on the CPU; the loader moves each batch",
        )
    return tensor
