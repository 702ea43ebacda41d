"""The one function that changes nothing: the default where something may be wrapped or reduced."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def identity(value: T) -> T:
    """The value itself, such as the sum over one rank."""
    return value
