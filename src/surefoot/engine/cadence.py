"""When something is due, and when a run is over: pure arithmetic on counts.

Never looks at a clock: the seconds that it compares are handed in.
"""

from __future__ import annotations

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

    step: int
    samples: int
    tokens: int
    epoch: int
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
