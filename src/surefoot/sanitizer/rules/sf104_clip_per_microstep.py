"""SF104: clipping partial sums within one accumulation window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, Tally, share
from surefoot.sanitizer.rules.windows import is_homogeneous
from surefoot.sanitizer.trace import Trace

LEAST = 2


class ClipPerMicrostep(Rule):
    """Several clips over the same parameters between two S, each after its own B."""

    info = RuleInfo(
        code="SF104",
        slug="clip-per-microstep",
        certainty=Certainty.STRONG,
        title="Gradients are clipped after every micro-batch of an accumulation window.",
        observes="Several clips over the same parameters within one update, each after its own"
        " backward(). Quiet for disjoint groups.",
        why="A partial sum is clipped again and again: later micro-batches count for more than"
        " earlier ones, and the limit no longer holds for the gradient of the update.",
        example="(loss / 4).backward()\nclip_grad_norm_(params, 1.0)\n"
        "if (i + 1) % 4 == 0: optimizer.step()",
        fix="Clip once per update, right before step().",
        source="Follows from what clip_grad_norm_ does to a sum.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
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

    def findings(self) -> Iterable[Finding]:
        for optimizer in self.trace.optimizers:
            tally = self.tallies.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, optimizer.steps):
                continue
            yield self.report(
                f"Up to {self.most[optimizer.key]} clips per update, each after its own"
                f" backward(), in {share(tally.count, optimizer.steps)} updates.",
                tally.site,
                evidence={
                    "updates": optimizer.steps,
                    "updates_with_several_clips": tally.count,
                    "clips_per_update": self.most[optimizer.key],
                },
            )
