"""Splits nested state into tensors and plain JSON values, and joins them again.

No pickle: what is neither a tensor nor JSON is refused by name.
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
MOST_LEVELS = 128
"""How deep state may be nested; readers of JSON go no deeper than a few hundred levels."""
MOST_BITS = 14_000
"""Of a whole number: Python reads and writes about 4,300 digits."""
RANKS_KEY = "ranks"
"""Below it stands what each rank has for itself, by the rank's number."""


@dataclass(frozen=True)
class Snapshot:
    """State as it is written: tensors by path, and a JSON value that says where each belongs."""

    tensors: Mapping[str, Tensor]
    values: Any


def split_tree(state: Any) -> Snapshot:
    """Splits `state`.

    Tensors that share storage and layout (tied weights) are kept once. No two others have one
    name. Nothing is copied.

    Raises:
        CheckpointError: a value is neither a tensor that can be written nor JSON; its path is
            named.
    """
    tensors: dict[str, Tensor] = {}
    known: dict[tuple[Any, ...], str] = {}

    def walk(value: Any, path: str, level: int) -> Any:
        if isinstance(value, Tensor):
            return {TENSOR_MARK: _keep(value, path, tensors, known)}
        if not isinstance(value, Mapping | tuple | list):
            return _plain(value, path)
        if level == MOST_LEVELS:
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
    """A key as a part of a path: two paths are equal only where all their keys are.

    Escaped as in a JSON pointer, https://www.rfc-editor.org/rfc/rfc6901#section-3, and what no file
    can hold (half of a surrogate pair) by its number.
    """
    escaped = key.replace("~", "~0").replace(KEY_SEPARATOR, "~1")
    return SURROGATE.sub(lambda found: f"~{ord(found[0]):x}", escaped)


def written_key(key: str) -> str:
    """A key as it stands in the JSON value, never a mark."""
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
    """What is equal for two dense tensors with elements that are one: where they lie and how they
    are read."""
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
        # A class of its own may print as something else.
        return str.__str__(key)
    raise CheckpointError(
        f"state has a key of type {type(key).__name__}: {key!r}",
        where=path or "top level",
        rule="keys of state are strings",
        remedy="use string keys in state_dict()",
    )


def _too_deep(path: str) -> CheckpointError:
    return CheckpointError(
        f"state is nested more than {MOST_LEVELS} levels deep, or holds itself",
        where=path,
        rule="a checkpoint holds tensors and JSON values",
        remedy="return flat lists and dicts from state_dict()",
    )


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise CheckpointError(
            f"a whole number of {value.bit_length():,} bits cannot be kept",
            where=path,
            rule=f"whole numbers have up to {MOST_BITS:,} bits",
            remedy="keep it as text in base 16",
        )
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT_MARK: repr(value)}
    raise CheckpointError(
        f"state of type {type(value).__module__}.{type(value).__qualname__} cannot be kept",
        where=path or "top level",
        rule="a checkpoint holds tensors and JSON values only, never pickled objects",
        remedy="return numbers, strings, lists, dicts and tensors from state_dict()",
    )
