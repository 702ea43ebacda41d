"""Investigates an update that went wrong: names the module, keeps the batches for a replay.

It changes no number of the run; what it keeps lies in the run's artifacts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from surefoot.core.reports import Event
from surefoot.engine.first_bad import FirstBad, described
from surefoot.engine.guard import Guard
from surefoot.engine.window import Window
from surefoot.observe.events import EventKind
from surefoot.run.folder_roles import Folder


@dataclass(frozen=True)
class BadWindows:
    """Runs a non-finite window again, and keeps the batches of every bad window."""

    first_bad: FirstBad
    guard: Guard
    folder: Folder

    def __call__(
        self, event: Event, window: Window, denominators: Mapping[str, float]
    ) -> dict[str, object]:
        """Further entries of the event's data. Every rank must call it."""
        found: dict[str, object] = {}
        if event.kind != EventKind.SPIKE:
            first_bad = self.first_bad.find(window, denominators)
            found = {"first_bad": first_bad, "meaning": described(first_bad)}
        batches = [micro_batch.data for micro_batch in window.micro_batches]
        roll_backs = [asdict(back) for back in self.guard.spikes.roll_backs]
        explained = replace(event, data={**event.data, **found})
        try:
            kept = self.folder.keep_batch(explained, batches, {"roll_backs": roll_backs})
        except OSError as error:
            # Such as a full disk: the event itself matters more.
            return {**found, "evidence": f"not kept: {error}"}
        if kept is not None:
            found["evidence"] = str(kept.relative_to(self.folder.path))
        return found
