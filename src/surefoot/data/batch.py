"""One micro-batch as the engine receives it, and its transfer to a device.

Traverses the containers of a batch; reads no values, so it never waits for a device.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from surefoot.core.errors import DataError

SINGLE_TERM = "loss"
"""Name of the weight of a task whose loss has one term."""


class CursorLike(Protocol):
    """What a run stores to resume its data: a `Cursor` or a `StreamCursor`."""

    @property
    def epoch(self) -> int: ...

    @property
    def position(self) -> int: ...

    def as_json(self) -> dict[str, Any]: ...


class MicroBatch(NamedTuple):
    """What one forward and backward sees on one rank, and the cursor after it."""

    data: Any
    """The collated batch, on the device."""
    weights: Mapping[str, float]
    """Number of loss-bearing items per term of the loss; `{"loss": w}` for a single term."""
    samples: int
    """Number of samples that count; 0 for a rank that has run out of data."""
    ids: tuple[int, ...]
    """Sample ids, in the order of the batch."""
    cursor_after: CursorLike
    ends_window: bool
    ends_epoch: bool = False
    epoch: int = 0

    def with_data(self, data: Any) -> MicroBatch:
        """The same micro-batch with other data, such as its copy on a device."""
        # Much cheaper than `dataclasses.replace`, and called for every batch.
        return MicroBatch(
            data,
            self.weights,
            self.samples,
            self.ids,
            self.cursor_after,
            self.ends_window,
            self.ends_epoch,
            self.epoch,
        )


def map_leaves(data: Any, function: Callable[[Any], Any]) -> Any:
    """Applies `function` to each leaf that can move, and rebuilds the containers around it.

    Leaves are tensors and objects with their own `.to`. Lists, tuples, named tuples, mappings and
    data classes are traversed; anything else is kept.
    """
    if isinstance(data, torch.Tensor) or _moves_itself(data):
        return function(data)
    if isinstance(data, tuple):
        items = [map_leaves(item, function) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, list):
        return [map_leaves(item, function) for item in data]
    if isinstance(data, Mapping):
        mapped = {key: map_leaves(value, function) for key, value in data.items()}
        return mapped if type(data) is dict else _like(data, mapped)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        moved = copy.copy(data)
        for field in dataclasses.fields(data):
            # A frozen data class refuses assignment, and `replace` would run its __init__.
            value = map_leaves(getattr(data, field.name), function)
            object.__setattr__(moved, field.name, value)
        return moved
    return data


def map_tensors(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`map_leaves` for tensors only; objects with their own `.to` are kept."""
    return map_leaves(data, lambda leaf: function(leaf) if _is_tensor(leaf) else leaf)


def move_to(data: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """Copies a batch to a device; what is there already is passed through.

    Args:
        data: tensors in tuples, named tuples, lists, mappings or data classes, or objects with
            their own `.to(device)`, such as a transformers `BatchEncoding`.
        device: the target.
        non_blocking: copy tensors in pinned memory asynchronously.

    Raises:
        DataError: an object's own `.to` raised.
    """

    def move(leaf: Any) -> Any:
        if _is_tensor(leaf):
            return leaf.to(device, non_blocking=non_blocking)
        return move_object(leaf, device)

    return map_leaves(data, move)


def move_object(leaf: Any, device: torch.device | str) -> Any:
    """Moves an object by its own `.to`.

    Raises:
        DataError: it raised.
    """
    try:
        return leaf.to(device)
    except Exception as error:
        raise DataError(
            f"a {type(leaf).__name__} could not be moved to {device}: {error}",
            rule="an object with its own `.to` accepts a device",
        ) from error


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _moves_itself(data: Any) -> bool:
    if isinstance(data, (tuple, list, dict, str, bytes, int, float, type)):
        return False
    return callable(getattr(data, "to", None))


def _like(original: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    clone = copy.copy(original)
    update = getattr(clone, "update", None)
    if update is None:
        return mapped
    update(mapped)
    return clone


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and its memory is aligned to 64 bytes."""
    return tensor.layout is torch.strided and tensor.data_ptr() % 64 == 0


def describe(data: Any) -> str:
    """Shapes and types of a batch or sample, as one short line for messages."""
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if hasattr(data, "dtype") and hasattr(data, "shape"):
        return f"{data.dtype}{list(data.shape)}"
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in data.items()) + "}"
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        entries = {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
        return type(data).__name__ + describe(entries)
    if isinstance(data, (tuple, list)):
        shown = ", ".join(describe(item) for item in data[:8])
        return f"({shown}{', …' if len(data) > 8 else ''})"
    if isinstance(data, (str, bytes)):
        return f"{type(data).__name__} of {len(data)}"
    return type(data).__name__
