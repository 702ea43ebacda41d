"""What the rules about accumulation share: what kind of window an update had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.state import BackwardRecord, UpdateRecord

LEAST_WINDOWS = 2
MOST_SITES = 64


def is_homogeneous(records: Sequence[BackwardRecord]) -> bool:
    """Whether all backward passes of a window are the same line doing the same thing.

    A second objective (the other half of a GAN, an auxiliary loss) is another line, or feeds
    another number of parameters.
    """
    return bool(records) and all(
        r.site == records[0].site and r.num_changed == records[0].num_changed for r in records
    )


def main_factor(record: BackwardRecord) -> float | None:
    """The constant factor of the mean-reduced loss in what was backpropagated; None if unknown."""
    factors = [t.factor for t in record.terms if t.reduction == "mean"]
    if not factors or any(f is None for f in factors):
        return None
    return max((f for f in factors if f is not None), key=abs)


class WindowTally:
    """Counts the sizes of homogeneous, unwiped windows of one optimizer."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        self.sites: set[Site] = set()
        self.other = 0

    def add(self, update: UpdateRecord) -> bool:
        """Whether the update had such a window."""
        if is_homogeneous(update.backwards) and not update.wipes:
            self.sizes[len(update.backwards)] += 1
            if len(self.sites) < MOST_SITES:
                self.sites.add(update.backwards[0].site)
            return True
        self.other += 1
        return False

    @property
    def usual(self) -> int:
        """The usual size where this optimizer accumulates; 0 where it does not, or is unclear."""
        if self.sizes.total() < LEAST_WINDOWS or self.other > self.sizes.total():
            return 0
        size, count = self.sizes.most_common(1)[0]
        return size if size >= 2 and count >= LEAST_WINDOWS else 0
