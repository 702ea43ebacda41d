"""Limits of a run and whether they are exceeded: pure arithmetic on times and devices.

Reads no clock. A run on the CPU counts as one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Spent:
    """One limit of a budget, and how much of it is used."""

    name: str
    """`device_hours`, `wall_clock` or `cost`."""
    used: float
    limit: float
    unit: str

    @property
    def is_gone(self) -> bool:
        return self.used >= self.limit

    def __str__(self) -> str:
        return f"{self.used:.4g} of {self.limit:.4g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a run; infinity for no limit.

    >>> [str(spent) for spent in Budget(device_hours=2.0).spent(3600.0, 4 * 3600.0)]
    ['4 of 2 device-hours']
    """

    device_hours: float = inf
    wall_seconds: float = inf
    cost: float = inf
    """In the currency of `price_per_device_hour`."""
    price_per_device_hour: float = 0.0

    def spent(self, wall_seconds: float, device_seconds: float) -> Iterator[Spent]:
        """Every limit that is set, with the amount used.

        Args:
            wall_seconds: wall time, summed over all attempts.
            device_seconds: the same, each attempt times its number of devices.
        """
        hours = device_seconds / 3600
        found = (
            Spent("device_hours", hours, self.device_hours, "device-hours"),
            Spent("wall_clock", wall_seconds, self.wall_seconds, "seconds"),
            Spent("cost", hours * self.price_per_device_hour, self.cost, "of money"),
        )
        return (spent for spent in found if spent.limit < inf)
