"""Which backward passes are worth a walk of their whole graph: the first, a few later, and news."""

from __future__ import annotations

FIRST_WALKS = 8
WALK_EVERY = 50
WALK_UNTIL = 1000
EXTRA_WALKS = 5
MOST_WALKS = 200


class GraphWalks:
    """Counts backward passes and decides which graphs are walked."""

    def __init__(self) -> None:
        self.backwards = 0
        self._walks = self._extra = 0
        self._last_fed: tuple[int, ...] = ()

    def begin(self) -> bool:
        """Counts the backward that begins now; returns whether its graph is walked."""
        n = self.backwards
        self.backwards += 1
        regular = n < FIRST_WALKS or (n % WALK_EVERY == 0 and n <= WALK_UNTIL) or n & (n - 1) == 0
        if self._extra:
            self._extra -= 1
        is_walked = regular or self._extra > 0
        self._walks += is_walked
        return is_walked

    def look_closer(self) -> None:
        """Something changed: worth a look at the next few graphs."""
        if self._walks < MOST_WALKS:
            self._extra = EXTRA_WALKS

    def fed(self, what: tuple[int, ...]) -> None:
        """Notes what a backward pass fed; a loop that does something new is looked at closer."""
        if what != self._last_fed:
            self.look_closer()
        self._last_fed = what
