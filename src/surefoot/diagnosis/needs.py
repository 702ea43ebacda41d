"""What a cause needs to have been recorded, as types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from surefoot.diagnosis.recording import Objective, Recording


class Need(Protocol):
    """One thing that must have been recorded."""

    @property
    def name(self) -> str:
        """As the doctor calls it where it is missing."""
        ...

    def is_met(self, recording: Recording) -> bool: ...


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the training rows, by its canonical name."""

    name: str

    def is_met(self, recording: Recording) -> bool:
        return recording.has(self.name)


@dataclass(frozen=True, slots=True)
class LossThatFalls:
    """A training loss that falls as the model learns: none of a policy gradient, or of players."""

    name: str = "loss"

    def is_met(self, recording: Recording) -> bool:
        return recording.has("loss") and recording.objective is Objective.LOSS


@dataclass(frozen=True, slots=True)
class ColumnPerPart:
    """At least two columns `PREFIX/PART`, such as one gradient norm for each tower."""

    prefix: str

    @property
    def name(self) -> str:
        return f"{self.prefix}/NAME"

    def is_met(self, recording: Recording) -> bool:
        return len(recording.family(self.prefix)) > 1


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of several."""

    needs: tuple[Need, ...]

    @property
    def name(self) -> str:
        return " or ".join(need.name for need in self.needs)

    def is_met(self, recording: Recording) -> bool:
        return any(need.is_met(recording) for need in self.needs)


@dataclass(frozen=True, slots=True)
class ValidationLoss:
    """The loss of some evaluation."""

    name: str = "validation loss"

    def is_met(self, recording: Recording) -> bool:
        return len(recording.validation[1]) > 0


@dataclass(frozen=True, slots=True)
class Events:
    """Some event."""

    name: str = "events"

    def is_met(self, recording: Recording) -> bool:
        return len(recording.events) > 0


LOSS, ANY_LOSS = LossThatFalls(), Column("loss")
RATE, GRADIENT = Column("lr"), Column("grad_norm")
EPOCH, BATCH_ITEMS = Column("epoch"), Column("weight")
DEVICE_UTILIZATION = Column("device_utilization")
MEMORY = AnyOf((Column("memory_bytes"), Column("host_memory_bytes")))
WAITING_TIME = AnyOf((Column("data_seconds"), Column("data_share")))
GRADIENT_PER_TOWER = ColumnPerPart("grad_norm")
VALIDATION_LOSS, EVENTS = ValidationLoss(), Events()
