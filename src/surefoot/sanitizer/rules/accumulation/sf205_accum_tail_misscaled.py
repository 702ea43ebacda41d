"""SF205: a short window is divided by the full window length."""

from __future__ import annotations

from collections import Counter, defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import WindowTally, is_homogeneous, main_factor
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule

MOST_FACTORS = 1000


class _Windows:
    """Windows of one optimizer whose gradients nobody changed by hand."""

    def __init__(self) -> None:
        self.tally = WindowTally()
        self.factors: Counter[tuple[int, float]] = Counter()
        """How often windows of that size had losses with that factor."""
        self.site = NOWHERE


class AccumTailMisscaled(Rule, page=__file__):
    """A window has fewer backward passes than the others, and its losses the same factor."""

    def setup(self) -> None:
        self.windows: dict[int, _Windows] = defaultdict(_Windows)

    def on_step_end(self, event: ev.StepEnd) -> None:
        update, windows = event.update, self.windows[event.optimizer.key]
        if update.wipes or update.touched or not is_homogeneous(update.backwards):
            return
        windows.tally.add(update)
        factors = {main_factor(record) for record in update.backwards}
        factor = factors.pop()
        if factor is not None and not factors and len(windows.factors) < MOST_FACTORS:
            windows.factors[len(update.backwards), round(factor, 9)] += 1
            windows.site = update.backwards[-1].site

    def findings(self) -> Findings:
        for windows in self.windows.values():
            usual, counts = windows.tally.usual, windows.factors
            full = [f for n, f in counts if n == usual and abs(f * n - 1) < 0.01]
            short = {n: c for (n, f), c in counts.items() if n < usual and f in full[:1]}
            if not short:
                continue
            size = max(short, key=lambda n: short[n])
            message = (
                f"{sum(short.values())} windows of {size} micro-batches had their losses divided"
                f" by {usual}, the length of a full window: that gradient is {size}/{usual} of"
                " what it should be."
            )
            yield self.report(
                message,
                windows.site,
                usual_window=usual,
                short_window=size,
                short_windows=sum(short.values()),
                factor=full[0],
            )
