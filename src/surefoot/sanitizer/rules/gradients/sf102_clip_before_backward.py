"""SF102: clipping where there are no gradients yet."""

from __future__ import annotations

from collections import Counter

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site, share

LEAST = 3
SHARE = 0.8


class ClipBeforeBackward(Rule):
    """Clip while every gradient is None or cleared."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.empty: Counter[Site] = Counter()
        self.all: Counter[Site] = Counter()

    def on_clip(self, event: ev.Clip) -> None:
        if event.inside_step or not event.parameters:
            return
        self.all[event.site] += 1
        if not any(s.contributions or s.unknown for s in event.parameters):
            self.empty[event.site] += 1

    def findings(self) -> Findings:
        for site, count in self.empty.items():
            if count < LEAST or count < SHARE * self.all[site]:
                continue
            yield self.report(
                f"In {share(count, self.all[site])} calls of this clip no parameter had a"
                " gradient: it runs before backward() and does nothing.",
                site,
                clips=self.all[site],
                without_gradient=count,
            )
