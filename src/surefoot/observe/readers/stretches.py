"""The attempts of a run: each from a start or resume to its end, and their total cost.

Time between a stop and the resume belongs to no attempt. Pure: events in, seconds out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from surefoot.core.reports import Event
from surefoot.observe.events import BEGINNINGS, EventKind

DEVICES_KEY = "devices"
"""Key in the event that begins an attempt: the number of devices. A CPU rank counts as one."""
LAST_SEEN_KEY = "last_seen"
"""Key in a resume event: last activity of the attempt before it, in Unix time."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One attempt of a run."""

    began: float
    """Unix time."""
    ended: float
    """Unix time of its end, or of its last activity if it was killed."""
    devices: int = 1

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def device_seconds(self) -> float:
        return self.seconds * self.devices


def stretches_of(events: Iterable[Event], last_seen: float | None = None) -> tuple[Stretch, ...]:
    """The attempts that these events describe.

    Args:
        events: all events of the run, in order.
        last_seen: last activity of the last attempt: its newest row, or now while it runs.
    """
    found: list[Stretch] = []
    began: Event | None = None
    seen = 0.0
    for event in events:
        if event.kind in BEGINNINGS:
            if began is not None:
                found.append(_stretch(began, max(seen, _number(event, LAST_SEEN_KEY))))
            began, seen = event, event.time
        elif event.kind != EventKind.UNREADABLE:
            seen = max(seen, event.time)
    if began is not None:
        found.append(_stretch(began, max(seen, last_seen or 0.0)))
    return tuple(found)


def elapsed_at(stretches: Sequence[Stretch], moment: float) -> float:
    """Seconds that the run had been running at `moment` (Unix time)."""
    return sum(min(max(moment, s.began), s.ended) - s.began for s in stretches)


def _stretch(began: Event, ended: float) -> Stretch:
    devices = int(_number(began, DEVICES_KEY)) or 1
    return Stretch(began.time, max(began.time, ended), devices)


def _number(event: Event, key: str) -> float:
    value = event.data.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
