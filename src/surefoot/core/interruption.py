"""The one way in which work is left half done because the run is to stop. It is no error."""

from __future__ import annotations

from collections.abc import Callable


class CutShort(BaseException):
    """Work was left; its result must not be used, and doing it again gives the same.

    Not an `Exception`: nobody who handles errors may take it for one.
    """


ShouldAbort = Callable[[], bool]
"""Whether work that can be done again shall be left."""


def never() -> bool:
    """Work is not left."""
    return False
