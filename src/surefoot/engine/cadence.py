"""When something is due, and when a run is over: pure arithmetic on counts.

Never looks at a clock: the seconds that it compares are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Unit(Enum):
    """What a cadence or a horizon counts."""

    STEPS = "step"
    SAMPLES = "samples"
    TOKENS = "tokens"
    EPOCHS = "epoch"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Mark:
    """The counts of a run at one moment."""

    step: float
    samples: float
    tokens: float
    epoch: float
    seconds: float

    def count(self, unit: Unit) -> float:
        value: float = getattr(self, unit.value)
        return value


@dataclass(frozen=True, slots=True)
class Every:
    """Due whenever a multiple of `amount` is reached or passed."""

    amount: float
    unit: Unit

    def due(self, before: Mark, now: Mark) -> bool:
        return now.count(self.unit) // self.amount > before.count(self.unit) // self.amount

    def due_at(self, now: Mark) -> float:
        """The count at which it is due next."""
        return (now.count(self.unit) // self.amount + 1) * self.amount


@dataclass(frozen=True, slots=True)
class AtEnd:
    """Due only when the run is over; the loop takes care of that."""

    def due(self, before: Mark, now: Mark) -> bool:
        return False


Cadence = Every | AtEnd


@dataclass(frozen=True, slots=True)
class Horizon:
    """Where a run ends."""

    amount: float
    unit: Unit

    def reached(self, now: Mark) -> bool:
        return now.count(self.unit) >= self.amount

    def due_at(self, now: Mark) -> float:
        """The count at which it is reached."""
        return self.amount


def frontier(rules: Iterable[Cadence | Horizon], now: Mark) -> Mark:
    """The smallest count of each unit at which any of the rules is due; infinity where none is.

    Below all of them nothing is due, which is a few comparisons for each update.
    """
    counts = {unit.value: math.inf for unit in Unit}
    for rule in rules:
        if not isinstance(rule, AtEnd):
            counts[rule.unit.value] = min(counts[rule.unit.value], rule.due_at(now))
    return Mark(**counts)
