"""SF104: clipping partial sums within one accumulation window."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import is_homogeneous
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site, Tally, share

LEAST = 2


class ClipPerMicrostep(Rule):
    """Several clips over the same parameters between two S, each after its own B."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.clipped: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.sites: dict[int, Site] = {}
        self.tallies: dict[int, Tally] = defaultdict(Tally)
        self.most: dict[int, int] = defaultdict(int)

    def on_clip(self, event: ev.Clip) -> None:
        if event.inside_step:
            return
        keys = {state.key for state in event.parameters if state.contributions}
        for optimizer in self.trace.optimizers:
            first = next((s.key for s in optimizer.parameters if s.key in keys), None)
            if first is not None and optimizer.window:
                self.clipped[optimizer.key][first].add(len(optimizer.window))
                self.sites[optimizer.key] = event.site

    def on_step_begin(self, event: ev.StepBegin) -> None:
        positions = self.clipped.pop(event.optimizer.key, {})
        most = max((len(places) for places in positions.values()), default=0)
        window = event.optimizer.window
        if most >= 2 and is_homogeneous(window) and not event.optimizer.wipes:
            self.tallies[event.optimizer.key].add(self.sites[event.optimizer.key])
            self.most[event.optimizer.key] = max(self.most[event.optimizer.key], most)

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, optimizer.steps):
                continue
            yield self.report(
                f"Up to {self.most[optimizer.key]} clips per update, each after its own"
                f" backward(), in {share(tally.count, optimizer.steps)} updates.",
                tally.site,
                updates=optimizer.steps,
                updates_with_several_clips=tally.count,
                clips_per_update=self.most[optimizer.key],
            )
