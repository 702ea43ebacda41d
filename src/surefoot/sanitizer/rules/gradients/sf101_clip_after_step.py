"""SF101: clipping gradients that a step has used already."""

from __future__ import annotations

from typing import NamedTuple

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, Site, UpdateTally, share

LEAST = 3


class _LateClip(NamedTuple):
    """A clip of gradients that a step had used, which may still be used again."""

    site: Site
    keys: frozenset[int]
    step_line: int
    limit: float
    norm: float | None


class ClipAfterStep(Rule, page=__file__):
    """A clip after step() and before the next backward(), of gradients that no step uses again."""

    def setup(self) -> None:
        self.waiting: dict[int, _LateClip] = {}
        self.latest: dict[int, _LateClip] = {}
        self.confirmed = UpdateTally(self.trace)

    def on_clip(self, event: ev.Clip) -> None:
        if event.inside_step:
            return
        keys = {state.key for state in event.parameters if state.used and not state.unknown}
        fresh = any(s.contributions > s.used or s.unknown for s in event.parameters)
        if not keys or fresh:
            return
        clipped = frozenset(state.key for state in event.parameters)
        for optimizer in self.trace.optimizers:
            mine = any(state.key in keys for state in optimizer.parameters)
            if mine and optimizer.last_step > optimizer.last_backward:
                line = optimizer.last_step_site.line
                clip = _LateClip(event.site, clipped, line, event.limit, event.norm)
                self.waiting[optimizer.key] = self.latest[optimizer.key] = clip

    def on_zero_grad(self, event: ev.ZeroGrad) -> None:
        # A step whose closure computes the gradients clears them there.
        zeroed = {state.key for state in event.parameters} if event.inside_step else set()
        for optimizer in self.trace.optimizers:
            clip = self.waiting.get(optimizer.key)
            if clip is not None and clip.keys & zeroed:
                self.confirmed.add(optimizer, clip.site)
                del self.waiting[optimizer.key]

    def on_step_begin(self, event: ev.StepBegin) -> None:
        if event.closure:
            return
        mine = {state.key: state for state in event.optimizer.parameters}
        for key, clip in list(self.waiting.items()):
            clipped = [mine[k] for k in clip.keys & mine.keys()]
            if not clipped:
                continue
            # Another optimizer, or the same one, may be about to use what was clipped.
            if all(state.used == 0 for state in clipped) and key == event.optimizer.key:
                self.confirmed.add(event.optimizer, clip.site)
            del self.waiting[key]

    def findings(self) -> Findings:
        for optimizer, tally in self.confirmed.often(LEAST, spare=1):
            # The clip that follows the very last step has no step after it to confirm it.
            count = tally.count + (optimizer.key in self.waiting)
            _, _, line, limit, norm = self.latest[optimizer.key]
            measured = "" if norm is None else f"; the norm was {norm:.3g} before the last clip"
            message = (
                f"Clip to {limit:g} comes after {optimizer.kind}.step() at line {line}, after"
                f" {share(count, optimizer.steps)} updates{measured}. The clipped gradients were"
                " cleared without being used."
            )
            yield self.report(
                message,
                tally.site,
                fix=f"Move the clip between backward() and the step at line {line}.",
                updates=optimizer.steps,
                clips_after_step=count,
                step_line=line,
                limit=limit,
                norm_before_clip=norm,
            )
