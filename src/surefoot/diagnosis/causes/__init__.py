"""The causes that the doctor knows: those of this package, and those that others bring.

Another package brings a `Cause` by an entry point of the group `surefoot.causes`; one that cannot
be imported, or clashes with another, is named and left out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from surefoot.core.doors import Door, brought
from surefoot.diagnosis.causes import (
    data,
    generalization,
    gradients,
    not_finite,
    rate_too_high,
    rate_too_low,
    resources,
)
from surefoot.diagnosis.causes.base import Cause

_FAMILIES = (
    rate_too_high, rate_too_low, gradients, not_finite, data, generalization, resources,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A cause that could not be asked, and why."""

    name: str
    origin: str
    reason: str


@functools.cache
def all_causes() -> tuple[Cause, ...]:
    """Every cause that can be asked, by code."""
    return _collected()[0]


def causes_left_out() -> tuple[LeftOut, ...]:
    """Causes of other packages that could not be taken in."""
    return _collected()[1]


@functools.cache
def _collected() -> tuple[tuple[Cause, ...], tuple[LeftOut, ...]]:
    own = (value for family in _FAMILIES for value in vars(family).values())
    found = [value for value in own if isinstance(value, Cause)]
    left_out = []
    for name, entry in brought(Door.CAUSES).items():
        try:
            found.append(_checked(entry.load(), found))
        except Exception as error:  # A part of another package may raise anything.
            left_out.append(LeftOut(name, entry.value, f"{type(error).__name__}: {error}"))
    return tuple(sorted(found, key=lambda cause: cause.info.code)), tuple(left_out)


def _checked(brought_in: object, others: list[Cause]) -> Cause:
    if not isinstance(brought_in, Cause):
        raise TypeError(f"it is a {type(brought_in).__name__}, not a Cause")
    for other in others:
        same = {brought_in.info.code, brought_in.info.slug} & {other.info.code, other.info.slug}
        if same:
            raise ValueError(f"{same.pop()} is a cause of {other.origin} already")
    return brought_in
