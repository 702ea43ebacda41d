"""SF104: clipping partial sums within one accumulation window."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import is_homogeneous
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule, UpdateTally

LEAST = 2


class _Clips:
    """Clips of one optimizer's gradients in the open window."""

    def __init__(self) -> None:
        self.site = NOWHERE
        self.positions: dict[int, set[int]] = defaultdict(set)
        """By parameter: after how many backward passes it was clipped."""


class ClipPerMicrostep(Rule, page=__file__):
    """Several clips over the same parameters in one update, each after its own backward()."""

    def setup(self) -> None:
        self.clips: dict[int, _Clips] = defaultdict(_Clips)
        self.several = UpdateTally(self.trace)

    def on_clip(self, event: ev.Clip) -> None:
        keys = {state.key for state in event.parameters if state.contributions}
        for optimizer in () if event.inside_step else self.trace.optimizers:
            first = next((s.key for s in optimizer.parameters if s.key in keys), None)
            if first is not None and optimizer.window:
                clips = self.clips[optimizer.key]
                clips.positions[first].add(len(optimizer.window))
                clips.site = event.site

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        clips = self.clips.pop(optimizer.key, None)
        most = max(map(len, clips.positions.values())) if clips is not None else 0
        if clips and most >= 2 and is_homogeneous(optimizer.window) and not optimizer.wipes:
            self.several.add(optimizer, clips.site, most)

    def findings(self) -> Findings:
        for optimizer, tally in self.several.often(LEAST):
            message = (
                f"Up to {tally.most} clips per update, each after its own backward(), in"
                f" {tally.of(optimizer.steps)} updates."
            )
            yield self.report(
                message,
                tally.site,
                updates=optimizer.steps,
                updates_with_several_clips=tally.count,
                clips_per_update=tally.most,
            )
