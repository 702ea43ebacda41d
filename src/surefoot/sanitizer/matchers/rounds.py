"""How often the loop went round its data: by loaders, or by what it does once in many updates."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.listener import Listener

LEAST_UPDATES = 2
"""What is done at every update marks no round."""
MOST_SITES = 256


@dataclass
class _Marks:
    first: int
    last: int
    count: int = 1
    shortest: int = 0


class Rounds(Listener):
    """Takes a line that calls train(), evaluates or saves every so often for the end of a round."""

    def setup(self) -> None:
        self._marks: dict[Site, _Marks] = {}

    def on_mode_changed(self, event: ev.ModeChanged) -> None:
        if event.by_user:
            self._mark(event.site)

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if not event.grad_enabled:
            self._mark(event.site)

    def on_state_taken(self, event: ev.StateTaken) -> None:
        if event.kind == "module":
            self._mark(event.site)

    def _mark(self, site: Site) -> None:
        now = self.trace.updates
        marks = self._marks.get(site)
        if marks is None:
            if len(self._marks) < MOST_SITES:
                self._marks[site] = _Marks(now, now)
        elif now > marks.last:
            gap = now - marks.last
            marks.shortest = min(marks.shortest or gap, gap)
            marks.last = now
            marks.count += 1

    def length(self) -> float:
        """Updates of a usual round; 0 where nothing tells."""
        loaders = [o for o in self.trace.loaders if o.steps and o.ends >= 2]
        if loaders:
            loader = max(loaders, key=lambda loader: loader.steps)
            return loader.steps / max(1, loader.epochs)
        regular = [m for m in self._marks.values() if m.count > 1 and m.shortest >= LEAST_UPDATES]
        if not regular:
            return 0.0
        marks = max(regular, key=lambda marks: marks.count)
        return (marks.last - marks.first) / (marks.count - 1)
