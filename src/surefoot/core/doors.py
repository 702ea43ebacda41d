"""Doors for other packages: what they bring by entry points. It imports only what is asked for.

A package declares, in its `pyproject.toml`, `[project.entry-points."surefoot.optimizers"]` with
`name = "package.module:object"`. A name that two packages bring is refused: no order of
installation decides what a run does.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from surefoot.core.errors import RequestError


class Door(Enum):
    """Kinds of parts that other packages bring; the value is the group of the entry points."""

    OPTIMIZERS = "surefoot.optimizers"
    SCHEDULES = "surefoot.schedules"
    CLIPS = "surefoot.clips"
    SAMPLERS = "surefoot.samplers"
    TASKS = "surefoot.tasks"
    METRICS = "surefoot.metrics"
    SOURCES = "surefoot.sources"
    OBSERVERS = "surefoot.observers"
    SINKS = "surefoot.sinks"
    RULES = "surefoot.rules"
    CAUSES = "surefoot.causes"


def brought(door: Door) -> Mapping[str, EntryPoint]:
    """The parts that installed packages bring, by name, sorted; nothing of them is imported.

    Raises:
        RequestError: two packages bring a part of one name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=door.value), key=lambda entry: entry.name):
        other = found.get(entry.name)
        # An environment may list one installation twice.
        if other is not None and other.value != entry.value:
            raise RequestError(
                f"two packages bring {entry.name!r}: {other.value} and {entry.value}",
                where=f"entry points {door.value}",
                rule="a name means one thing",
                remedy="remove one of the packages, or have it use another name",
            )
        found[entry.name] = entry
    return found


def load_part(door: Door, name: str) -> Any:
    """Imports the part of that name.

    Raises:
        RequestError: no package brings it, or it cannot be imported.
    """
    entries = brought(door)
    if name not in entries:
        raise RequestError(
            f"no installed package brings {name!r}",
            where=f"entry points {door.value}",
            rule=f"there are: {', '.join(entries) or 'none'}",
            remedy="install the package that brings it, or correct the name",
        )
    try:
        return entries[name].load()
    except (ImportError, AttributeError) as error:
        raise RequestError(
            f"{name!r} cannot be imported: {type(error).__name__}: {error}",
            where=f"{entries[name].value}, entry point {door.value}",
            rule="an entry point names package.module:object",
            remedy="correct or remove the package that brings it",
        ) from error
