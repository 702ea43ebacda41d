"""SF205: a short window is divided by the full window length."""

from __future__ import annotations

from collections import Counter, defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import WindowTally, is_homogeneous, main_factor
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site


class AccumTailMisscaled(Rule):
    """The last window has fewer B but the same loss-to-root ratio."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.windows: dict[int, WindowTally] = defaultdict(WindowTally)
        self.factors: dict[int, Counter[tuple[int, float]]] = defaultdict(Counter)
        self.sites: dict[int, Site] = {}

    def on_step_end(self, event: ev.StepEnd) -> None:
        update, key = event.update, event.optimizer.key
        if update.wipes or update.touched or not is_homogeneous(update.backwards):
            return
        self.windows[key].add(update)
        factors = {main_factor(record) for record in update.backwards}
        if len(factors) == 1 and len(self.factors[key]) < 1000:
            factor = factors.pop()
            if factor is not None:
                self.factors[key][len(update.backwards), round(factor, 9)] += 1
                self.sites[key] = update.backwards[-1].site

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            usual = self.windows[optimizer.key].usual
            counts = self.factors[optimizer.key]
            full = [(n, f) for n, f in counts if n == usual and abs(f * n - 1) < 0.01]
            if not usual or not full:
                continue
            factor = full[0][1]
            short = {n: c for (n, f), c in counts.items() if n < usual and f == factor}
            if not short:
                continue
            size = max(short, key=lambda n: short[n])
            yield self.report(
                f"{sum(short.values())} windows of {size} micro-batches had their losses divided"
                f" by {usual}, the length of a full window: that gradient is {size}/{usual} of"
                " what it should be.",
                self.sites[optimizer.key],
                usual_window=usual,
                short_window=size,
                short_windows=sum(short.values()),
                factor=factor,
            )
