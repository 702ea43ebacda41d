"""Counting: occurrences by place, by optimizer, and looks that said yes or no."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.state import OptimizerState
from surefoot.sanitizer.trace import Trace

MOST_KEYS = 1000
"""What is seen at more places is not told by place any more."""
FIRST_LOOKS = 8
K = TypeVar("K", bound=Hashable)


def share(part: int, whole: int) -> str:
    """`40 of 40`."""
    return f"{part} of {whole}"


def look_now(call: int) -> bool:
    """Whether the `call`-th call of a place is one of the few whose values are read."""
    return call <= FIRST_LOOKS or call & (call - 1) == 0


class Tally:
    """Counts occurrences by place; each may come with a number."""

    def __init__(self) -> None:
        self.sites: Counter[Site] = Counter()
        self.latest = self.most = 0
        """The latest and the greatest of the numbers."""

    def add(self, site: Site, number: int = 0) -> None:
        if len(self.sites) < MOST_KEYS or site in self.sites:
            self.sites[site] += 1
            self.latest, self.most = number, max(self.most, number)

    def of(self, whole: int) -> str:
        """`40 of 40`."""
        return share(self.count, whole)

    @property
    def count(self) -> int:
        return self.sites.total()

    @property
    def site(self) -> Site:
        """The most frequent place."""
        return self.sites.most_common(1)[0][0] if self.sites else NOWHERE


class UpdateTally:
    """Counts, for each optimizer, updates in which something was seen."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._by_key: dict[int, Tally] = defaultdict(Tally)

    def add(self, optimizer: OptimizerState, site: Site, number: int = 0) -> None:
        self._by_key[optimizer.key].add(site, number)

    def often(
        self, least: int, part: float = 0.0, *, short_runs: bool = True, spare: int = 0
    ) -> Iterator[tuple[OptimizerState, Tally]]:
        """The optimizers for which it was seen in `least` updates and in that part of all.

        With `short_runs`, an optimizer with fewer updates needs no more than all of them, save
        `spare`.
        """
        for optimizer in self.trace.optimizers:
            tally, steps = self._by_key.get(optimizer.key), optimizer.steps
            needed = max(min(least, max(steps - spare, 1)) if short_runs else least, part * steps)
            if tally is not None and tally.count >= needed:
                yield optimizer, tally


class Looks(Generic[K]):
    """Looks at each of several things, and how many of them said yes."""

    def __init__(self) -> None:
        self.yes: Counter[K] = Counter()
        self.all: Counter[K] = Counter()

    def add(self, key: K, found: bool) -> None:
        if len(self.all) < MOST_KEYS or key in self.all:
            self.all[key] += 1
            self.yes[key] += found

    def often(self, least: int, part: float = 1.0) -> Iterator[tuple[K, int, int]]:
        """Things of which at least `least` looks, and that part of all, said yes: both counts."""
        for key, count in self.yes.items():
            if count >= least and count >= part * self.all[key]:
                yield key, count, self.all[key]
