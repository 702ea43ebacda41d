"""Hashes of samples and datasets: equal text if and only if the data is equal.

Traverses plain containers, tensors and arrays. Never hashes an address, a time or an insertion
order.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# Number of samples read where a dataset can only be fingerprinted by reading it.
_NUM_SAMPLED = 64


def hash_value(value: Any, digest: hashlib.blake2b | None = None) -> str:
    """Hex digest of a sample: tensors, arrays, text, numbers and containers of them.

    Other objects are hashed by class name and, if available, `tobytes()`.
    """
    digest = digest or hashlib.blake2b(digest_size=16)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: hashlib.blake2b, value: Any) -> None:
    def label(text: str) -> None:
        digest.update(f"{text};".encode("utf-8", "surrogateescape"))

    if isinstance(value, torch.Tensor):
        label(f"tensor {value.dtype} {tuple(value.shape)}")
        flat = value.detach().cpu().contiguous().reshape(-1)
        data: Any = flat.view(torch.uint8).numpy()
        digest.update(data)
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        label(f"array {array.dtype} {array.shape}")
        digest.update(array.tobytes() if array.dtype != object else repr(array.tolist()).encode())
    elif isinstance(value, (bytes, bytearray)):
        label(f"bytes {len(value)}")
        digest.update(value)
    elif isinstance(value, str):
        label(f"text {len(value)}")
        digest.update(value.encode("utf-8", "surrogateescape"))
    elif value is None or isinstance(value, (bool, int, float, complex)):
        label(f"{type(value).__name__} {value!r}")
    elif isinstance(value, Mapping):
        label(f"mapping {len(value)}")
        for key in sorted(value, key=repr):
            label(repr(key))
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        label(f"{type(value).__name__} {len(value)}")
        for item in value:
            _feed(digest, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        label(type(value).__qualname__)
        for field in dataclasses.fields(value):
            _feed(digest, getattr(value, field.name))
    else:
        label(f"{type(value).__module__}.{type(value).__qualname__}")
        to_bytes = getattr(value, "tobytes", None)
        if callable(to_bytes):
            digest.update(to_bytes())


def sampled_indices(num_samples: int) -> list[int]:
    """At most 64 evenly spaced indices, including the first and the last."""
    if num_samples <= _NUM_SAMPLED:
        return list(range(num_samples))
    return sorted({round(i * (num_samples - 1) / (_NUM_SAMPLED - 1)) for i in range(_NUM_SAMPLED)})
