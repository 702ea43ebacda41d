"""An observer and a sink."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from surefoot import Event, StepReport


class Counter:
    """Counts updates, and keeps the kinds of events."""

    made: ClassVar[list[Any]] = []

    def __init__(self, start: int = 0) -> None:
        self.updates = start
        self.kinds: list[str] = []
        Counter.made.append(self)

    def on_step(self, report: StepReport) -> None:
        self.updates += 1

    def on_event(self, event: Event) -> None:
        self.kinds.append(event.kind)


class LossFile:
    """Writes one loss a line into `losses.txt` of the run folder."""

    def __init__(self, folder: Path, digits: int = 17) -> None:
        self.file = (folder / "losses.txt").open("a")
        self.digits = digits

    def on_step(self, report: StepReport) -> None:
        self.file.write(f"{report.loss:.{self.digits}g}\n")

    def close(self) -> None:
        self.file.close()
