"""What is to be audited, and how a process hands over what it saw. Runs nothing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.sanitizer.session import Summary


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
    """A request for the ranks that run it."""
    return json.dumps(request.__dict__)


def request_from_json(text: str) -> Request:
    """The inverse of `request_as_json`, for one rank."""
    values = json.loads(text)
    values["arguments"] = tuple(values["arguments"])
    return replace(Request(**values), num_ranks=1)


def write_report(summary: Summary, folder: Path) -> None:
    """Leaves what one process saw where the one that started it looks."""
    file = folder / f"report-{summary.rank:05d}-{os.getpid()}.json"
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(summary.as_json(), default=str))
    temporary.replace(file)
