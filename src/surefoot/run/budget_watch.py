"""Ends a run whose budget is spent: it asks for a stop, and the run saves as at any other request.

What was spent before a resume is read from the events, lost stretches included, so that what counts
is what was paid for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Protocol, TypeVar

from surefoot.config.sections.contract import ContractOnSection, ContractSection
from surefoot.core.budget import Budget
from surefoot.core.reports import Event
from surefoot.core.units import Seconds
from surefoot.observe.events import EventKind
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
        past_events: what has happened to it before.
        last_seen: Unix time of its last update before; 0 where there was none.
        tell: records the event.
        stop: is asked to stop where a limit is reached.
        clock: seconds.
    """

    def __init__(
        self,
        budget: Budget,
        devices: int,
        past_events: Iterable[Event],
        last_seen: float,
        tell: Tell,
        stop: Asked,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.devices = devices
        self._stop = stop
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._last_seen = last_seen
        before = stretches_of(past_events, last_seen)
        self._wall_before = sum(stretch.seconds for stretch in before)
        self._device_before = sum(stretch.device_seconds for stretch in before)
        self._ends_at = self._end()

    def event_data(self) -> dict[str, object]:
        """What the event that begins this attempt says of it; its time counts from here."""
        self._began = self._clock()
        self._ends_at = self._end()
        last_seen = {LAST_SEEN_KEY: self._last_seen} if self._last_seen else {}
        return {DEVICES_KEY: self.devices, **last_seen}

    def check(self) -> None:
        """Asks for a stop where a limit is reached, once; costs one look at the clock."""
        if self._clock() < self._ends_at:
            return
        self._ends_at = inf
        wall = self._clock() - self._began
        used = list(self.budget.spent(self._wall_before + wall, self._used(wall)))
        gone = max(used, key=lambda spent: spent.used / spent.limit)
        reason = f"the budget is spent: {gone}"
        spent_by_name = {spent.name: spent.used for spent in used}
        self._tell(EventKind.BUDGET, reason, {"limit": gone.name, **spent_by_name})
        self._stop.ask(reason)

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
