"""Summary of update times at the end: median, 95th percentile, slowest, wait for data."""

from __future__ import annotations

import sys
from statistics import median

from surefoot.core.reports import StepReport


class Stopwatch:
    """Keeps the duration of each update, and prints a summary to standard error at the end.

    The first update is left out: it allocates, compiles and fills caches.

    >>> Stopwatch().summary()
    'no update was timed'
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._windows: list[int] = []
        self._data_seconds = 0.0
        self._is_first = True

    def __repr__(self) -> str:
        return f"Stopwatch({self.summary()})"

    def on_step(self, report: StepReport) -> None:
        if self._is_first:
            self._is_first = False
            return
        self._seconds.append(report.step_seconds)
        self._windows.append(report.window)
        self._data_seconds += report.data_seconds

    def close(self) -> None:
        print(self.summary(), file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Median, 95th percentile and slowest update in ms; share of the wait for data."""
        if not self._seconds:
            return "no update was timed"
        ordered = sorted(self._seconds)
        slowest = max(range(len(self._seconds)), key=self._seconds.__getitem__)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        waited = self._data_seconds / max(sum(ordered), 1e-12)
        return (
            f"{len(ordered)} updates: median {1e3 * median(ordered):.4g} ms, 95 % within "
            f"{1e3 * p95:.4g} ms, slowest {1e3 * ordered[-1]:.4g} ms in window "
            f"{self._windows[slowest]}; {waited:.1%} of the time waiting for data"
        )
