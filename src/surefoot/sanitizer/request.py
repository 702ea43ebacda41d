"""What is to be audited. Imports no torch; runs nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace


class StopAudit(BaseException):
    """Ends the script after the number of updates that was asked for."""


@dataclass(frozen=True)
class Request:
    """What to run, and how to look at it."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    deep: bool = False
    max_updates: int | None = None
    num_ranks: int = 1


def request_as_json(request: Request) -> str:
    """A request for the processes that run it."""
    return json.dumps(request.__dict__)


def request_from_json(text: str) -> Request:
    """The inverse of `request_as_json`, for one process."""
    values = json.loads(text)
    values["arguments"] = tuple(values["arguments"])
    return replace(Request(**values), num_ranks=1)
