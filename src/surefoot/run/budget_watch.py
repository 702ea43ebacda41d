"""Ends a run whose budget is spent: it asks for a stop, and the run saves as at any other request.

What was spent before a resume is read from the events, lost stretches included, so that what counts
is what was paid for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Protocol, TypeVar

from surefoot.config.sections.contract import ContractOnSection, ContractSection
from surefoot.core.budget import Budget
from surefoot.core.units import Seconds
from surefoot.observe.events import EventKind, read_events
from surefoot.observe.metrics_log import last_step_row
from surefoot.observe.metrics_schema import number
from surefoot.observe.readers.stretches import DEVICES_KEY, LAST_SEEN_KEY, stretches_of

Item = TypeVar("Item")
Tell = Callable[[str, str, Mapping[str, object]], None]


class Asked(Protocol):
    """What can be asked to stop."""

    def ask(self, reason: str) -> None: ...


def budget_of(contract: ContractSection) -> Budget:
    """The limits that a contract sets."""
    if not isinstance(contract, ContractOnSection):
        return Budget()
    section = contract.budget
    wall = section.wall_clock
    return Budget(
        device_hours=_limit(section.device_hours),
        wall_seconds=float(wall.value) if isinstance(wall, Seconds) else inf,
        cost=_limit(section.cost),
        price_per_device_hour=_limit(section.price_per_device_hour, none=0.0),
    )


def _limit(value: float | str, none: float = inf) -> float:
    return none if isinstance(value, str) else value


class Spending:
    """Watches what a run spends, from now on and before.

    Args:
        budget: its limits.
        devices: how many this attempt holds; a CPU rank is one.
        events: its event log, which may not be there yet.
        metrics: its metrics log.
        tell: records the event.
        clock: seconds.
    """

    def __init__(
        self,
        budget: Budget,
        devices: int,
        events: Path,
        metrics: Path,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.devices = devices
        self.asked: Asked | None = None
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._last_seen = _last_seen(metrics)
        before = stretches_of(read_events(events) if events.is_file() else (), self._last_seen)
        self._wall_before = sum(stretch.seconds for stretch in before)
        self._device_before = sum(stretch.device_seconds for stretch in before)
        self._ends_at = self._end()

    def told(self) -> dict[str, object]:
        """What the event that begins this attempt says of it; its time counts from here."""
        self._began = self._clock()
        self._ends_at = self._end()
        last_seen = {LAST_SEEN_KEY: self._last_seen} if self._last_seen else {}
        return {DEVICES_KEY: self.devices, **last_seen}

    def check(self) -> None:
        """Asks for a stop where a limit is reached, once; costs one look at the clock."""
        if self.asked is None or self._clock() < self._ends_at:
            return
        self._ends_at = inf
        wall = self._clock() - self._began
        used = list(self.budget.spent(self._wall_before + wall, self._used(wall)))
        gone = max(used, key=lambda spent: spent.used / spent.limit)
        reason = f"the budget is spent: {gone}"
        told = {spent.name: spent.used for spent in used}
        self._tell(EventKind.BUDGET, reason, {"limit": gone.name, **told})
        self.asked.ask(reason)

    def watching(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; the budget is looked at after each was worked on."""
        for item in items:
            self.check()
            yield item

    def _used(self, wall: float) -> float:
        return self._device_before + wall * self.devices

    def _end(self) -> float:
        """The moment of the clock at which the first limit is reached."""
        budget, left = self.budget, [self.budget.wall_seconds - self._wall_before]
        hours = budget.device_hours
        if budget.cost < inf:
            hours = min(hours, budget.cost / budget.price_per_device_hour)
        left.append((hours * 3600 - self._device_before) / self.devices)
        return self._began + min(left)


def _last_seen(metrics: Path) -> float:
    """The time of the last update in a log; 0 where there is none, or a row that cannot be read."""
    try:
        row = last_step_row(metrics)
        return 0.0 if row is None else number(row["time"])
    except (OSError, ValueError, KeyError):
        # What is wrong with the log is said where the run looks for its place in it.
        return 0.0
