"""Splits nested state into tensors and plain JSON values, and joins them again.

No pickle: a value that is neither a tensor nor JSON is refused by its path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from surefoot.core.errors import GO_ON_FROM_OLDER, CheckpointError
from surefoot.state.tensor_file import refuse_unwritable

TENSOR_MARK = "$tensor"
FLOAT_MARK = "$float"
TUPLE_MARK = "$tuple"
MARK_SIGN = "$"
KEY_SEPARATOR = "/"
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_NESTING_LEVELS = 128
"""Deepest nesting of state; JSON readers support a few hundred levels."""
MAX_INTEGER_BITS = 14_000
"""Largest bit length of an integer: Python reads and writes about 4,300 digits."""
RANKS_KEY = "ranks"
"""Key of what each rank has for itself, by rank number."""


@dataclass(frozen=True)
class Snapshot:
    """State as it is written: tensors by path, and a JSON value that refers to them."""

    tensors: Mapping[str, Tensor]
    values: Any


def split_tree(state: Any) -> Snapshot:
    """Splits nested state. Nothing is copied.

    Tensors that share storage and layout (tied weights) are stored once. All other paths are
    unique.

    Raises:
        CheckpointError: a value is neither a tensor that can be written nor JSON; names its path.
    """
    tensors: dict[str, Tensor] = {}
    known: dict[tuple[Any, ...], str] = {}

    def walk(value: Any, path: str, level: int) -> Any:
        if isinstance(value, Tensor):
            return {TENSOR_MARK: _keep(value, path, tensors, known)}
        if not isinstance(value, Mapping | tuple | list):
            return _plain(value, path)
        if level == MAX_NESTING_LEVELS:
            raise _too_deep(path)

        def below(key: str, item: Any) -> Any:
            return walk(item, f"{path}{KEY_SEPARATOR}{key}" if level else key, level + 1)

        if isinstance(value, Mapping):
            return {
                written_key(key): below(path_part(key), item)
                for key, item in ((_key(key, path), item) for key, item in value.items())
            }
        items = [below(str(i), item) for i, item in enumerate(value)]
        return {TUPLE_MARK: items} if isinstance(value, tuple) else items

    return Snapshot(tensors, walk(state, "", 0))


def path_part(key: str) -> str:
    """A key as part of a path; paths are equal only if all their keys are.

    Escaped as in a JSON pointer, https://www.rfc-editor.org/rfc/rfc6901#section-3; a lone
    surrogate, which no file can hold, by its number.
    """
    escaped = key.replace("~", "~0").replace(KEY_SEPARATOR, "~1")
    return SURROGATE.sub(lambda found: f"~{ord(found[0]):x}", escaped)


def written_key(key: str) -> str:
    """A key as written in the JSON value, never a mark."""
    return MARK_SIGN + key if key.startswith(MARK_SIGN) else key


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
            return {key.removeprefix(MARK_SIGN): walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return value

    return walk(snapshot.values)


def tensors_named(values: Any) -> Iterator[str]:
    """Paths of the tensors named in a snapshot's JSON value, with repetitions."""
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
    # Sharded tensors (DTensor) are identified by the storage of their local part.
    memory: Any = tensor
    if hasattr(memory, "to_local"):
        memory = memory.detach().to_local()
    refuse_unwritable(path, memory)
    identity = (tuple(tensor.shape), tensor.stride(), *memory_seen(memory))
    if tensor.numel() and identity in known:
        return known[identity]
    known[identity] = path
    tensors[path] = tensor.detach()
    return path


def memory_seen(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two dense, non-empty tensors that are views of the same memory with
    the same layout."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _tensor(snapshot: Snapshot, name: str) -> Tensor:
    if name not in snapshot.tensors:
        raise CheckpointError(
            f"the checkpoint names a tensor that it does not hold: {name}",
            rule="state.json and the tensor files belong together",
            remedy=GO_ON_FROM_OLDER,
        )
    return snapshot.tensors[name]


def _key(key: Any, path: str) -> str:
    if isinstance(key, str):
        # A subclass may print differently.
        return str.__str__(key)
    raise CheckpointError(
        f"state has a key of type {type(key).__name__}: {key!r}",
        where=path or "top level",
        rule="keys of state are strings",
        remedy="use string keys in state_dict()",
    )


def _too_deep(path: str) -> CheckpointError:
    return CheckpointError(
        f"state is nested more than {MAX_NESTING_LEVELS} levels deep, or contains itself",
        where=path,
        rule="a checkpoint holds tensors and JSON values",
        remedy="return flat lists and dicts from state_dict()",
    )


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise CheckpointError(
            f"an integer of {value.bit_length():,} bits cannot be stored",
            where=path,
            rule=f"integers have at most {MAX_INTEGER_BITS:,} bits",
            remedy="store it as text in base 16",
        )
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT_MARK: repr(value)}
    raise CheckpointError(
        f"state of type {type(value).__module__}.{type(value).__qualname__} cannot be stored",
        where=path or "top level",
        rule="a checkpoint holds only tensors and JSON values, never pickled objects",
        remedy="return numbers, strings, lists, dicts and tensors from state_dict()",
    )
