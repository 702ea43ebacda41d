"""Splits nested state into tensors and plain JSON values, and joins them again.

No pickle: what is neither a tensor nor JSON is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.core.errors import CheckpointError

TENSOR_MARK = "$tensor"
FLOAT_MARK = "$float"
TUPLE_MARK = "$tuple"
KEY_SEPARATOR = "/"
RANKS_KEY = "ranks"
"""Below it stands what each rank has for itself, by the rank's number."""


@dataclass(frozen=True)
class Snapshot:
    """State as it is written: tensors by path, and a JSON value that says where each belongs."""

    tensors: Mapping[str, Tensor]
    values: Any


def split_tree(state: Any) -> Snapshot:
    """Splits `state`.

    Tensors that share storage and layout (tied weights) are kept once.

    Raises:
        CheckpointError: a value is neither a tensor nor JSON; its path is named.
    """
    tensors: dict[str, Tensor] = {}
    known: dict[tuple[Any, ...], str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return {TENSOR_MARK: _keep(value.detach(), path, tensors, known)}
        if isinstance(value, Mapping):
            return {
                _key(key, path): walk(item, f"{path}{KEY_SEPARATOR}{key}".lstrip("/"))
                for key, item in value.items()
            }
        if isinstance(value, tuple):
            return {TUPLE_MARK: [walk(v, f"{path}{KEY_SEPARATOR}{i}") for i, v in enumerate(value)]}
        if isinstance(value, list):
            return [walk(v, f"{path}{KEY_SEPARATOR}{i}") for i, v in enumerate(value)]
        return _plain(value, path)

    values = walk(state, "")
    return Snapshot(tensors, values)


def join_tree(snapshot: Snapshot) -> Any:
    """The inverse of `split_tree`."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            if len(value) == 1:
                ((mark, inner),) = value.items()
                if mark == TENSOR_MARK:
                    return _tensor(snapshot, inner)
                if mark == FLOAT_MARK:
                    return float(inner)
                if mark == TUPLE_MARK:
                    return tuple(walk(item) for item in inner)
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return value

    return walk(snapshot.values)


def tensors_named(values: Any) -> Iterator[str]:
    """Paths of the tensors that the JSON value of a snapshot names, each as often as it does."""
    if isinstance(values, Mapping):
        if set(values) == {TENSOR_MARK}:
            yield str(values[TENSOR_MARK])
        else:
            for item in values.values():
                yield from tensors_named(item)
    elif isinstance(values, list):
        for item in values:
            yield from tensors_named(item)


def _keep(
    tensor: Tensor, path: str, tensors: dict[str, Tensor], known: dict[tuple[Any, ...], str]
) -> str:
    # Sharded tensors (DTensor) are known by the memory of their part on this rank.
    memory = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    identity = (memory.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    if tensor.numel() and identity in known:
        return known[identity]
    known[identity] = path
    tensors[path] = tensor
    return path


def _tensor(snapshot: Snapshot, name: str) -> Tensor:
    if name not in snapshot.tensors:
        raise CheckpointError(
            f"the checkpoint names a tensor that it does not hold: {name}",
            rule="state.json and the tensor files belong together",
            remedy="resume from an older checkpoint",
        )
    return snapshot.tensors[name]


def _key(key: Any, path: str) -> str:
    if isinstance(key, str) and not key.startswith("$"):
        return key
    raise CheckpointError(
        f"state has a key of type {type(key).__name__}: {key!r}",
        where=path or "top level",
        rule="keys of state are strings that do not start with '$'",
        remedy="use string keys in state_dict()",
    )


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, (torch.Size,)):
        return list(value)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT_MARK: repr(value)}
    raise CheckpointError(
        f"state of type {type(value).__module__}.{type(value).__qualname__} cannot be kept",
        where=path,
        rule="a checkpoint holds tensors and JSON values only, never pickled objects",
        remedy="return numbers, strings, lists, dicts and tensors from state_dict()",
    )
