"""Checks of values on the CPU batch, each naming the value, its place and the allowed range.

Called from `weight`, never on the way of a forward: to look at a value is to wait for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.core.errors import DataError
from surefoot.tasks.losses import IGNORE_INDEX

_INDEX_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_indices(name: str, values: Tensor, num_classes: int, *, ignorable: bool) -> None:
    """Checks that class or token indices lie in [0, num_classes), or are -100 if `ignorable`.

    Raises:
        DataError: a wrong dtype or value.
    """
    if values.dtype not in _INDEX_TYPES:
        raise DataError(
            f"{name} has dtype {values.dtype}",
            where=name,
            rule="class indices are integers",
            remedy="convert with .long(), or take the task that fits the targets",
        )
    good = (values >= 0) & (values < num_classes)
    if ignorable:
        good |= values == IGNORE_INDEX
    if not good.all():
        extra = f", or {IGNORE_INDEX} where an item does not count" if ignorable else ""
        raise bad_value(
            name,
            values,
            good,
            rule=f"0 <= index < {num_classes}{extra}",
            remedy="correct the data, or the number of classes",
        )


def check_within(name: str, values: Tensor, low: float, high: float) -> None:
    """Checks that every value lies in [low, high].

    Raises:
        DataError: a value is outside, or NaN.
    """
    good = (values >= low) & (values <= high)
    if not good.all():
        raise bad_value(
            name,
            values,
            good,
            rule=f"{low} <= value <= {high}",
            remedy="correct the data, or take the task that fits it",
        )


def check_finite(name: str, values: Tensor) -> None:
    """Checks that every value is finite.

    Raises:
        DataError: a value is NaN or infinite.
    """
    good = values.isfinite()
    if not good.all():
        raise bad_value(
            name,
            values,
            good,
            rule="every value is finite",
            remedy="drop the sample, or leave the element out with target_mask",
        )


def bad_value(name: str, values: Tensor, good: Tensor, *, rule: str, remedy: str) -> DataError:
    """The error for the first value (in memory order) that is not good.

    Its `batch_position` is the row at fault; whoever made the batch knows that row's sample id.
    """
    place = (~good).nonzero()[0].tolist()
    value = values[tuple(place)].item()
    position = place[0] if place else 0
    error = DataError(
        f"{name} holds {value}",
        where=f"batch position {position}" + (f", place {place[1:]}" if len(place) > 1 else ""),
        rule=rule,
        remedy=remedy,
    )
    error.batch_position = position
    return error


def fitted_mask(target: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask at the target's shape; a mask [B] counts or leaves out whole samples.

    Raises:
        DataError: the mask has another shape.
    """
    if mask is None or mask.shape == target.shape:
        return mask
    if mask.shape == target.shape[:1]:
        return mask.view(-1, *[1] * (target.dim() - 1)).expand_as(target)
    raise DataError(
        f"target_mask has shape {list(mask.shape)}",
        where="target_mask",
        rule=f"the target's shape {list(target.shape)}, or one entry a sample",
        remedy="give one true or false for each element of the target",
    )
