"""What the rules about a loss's input share: counting calls by place, looking at few of them."""

from __future__ import annotations

from collections import Counter

from surefoot.sanitizer.frames import Site

FIRST_LOOKS = 8


def look_now(call: int) -> bool:
    """Whether the `call`-th call of a place is one of the few whose values are read."""
    return call <= FIRST_LOOKS or call & (call - 1) == 0


class Verdicts:
    """Yes and no by place."""

    def __init__(self) -> None:
        self.yes: Counter[Site] = Counter()
        self.all: Counter[Site] = Counter()

    def add(self, site: Site, found: bool) -> None:
        if len(self.all) < 1000 or site in self.all:
            self.all[site] += 1
            self.yes[site] += found

    def always(self, least: int = 3) -> list[tuple[Site, int]]:
        """Places where every look said yes, at least `least` looks or all there were."""
        return [
            (site, count)
            for site, count in self.yes.items()
            if count == self.all[site] and count >= min(least, self.all[site])
        ]
