"""SF101: clipping gradients that a step has used already."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site, Tally, share

LEAST = 3


class ClipAfterStep(Rule):
    """Clip after S and before the next B, of gradients that are zeroed before any further S."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.waiting: dict[int, tuple[ev.Clip, int]] = {}
        self.confirmed: dict[int, Tally] = defaultdict(Tally)
        self.example: dict[int, tuple[Site, float, float | None]] = {}

    def on_clip(self, event: ev.Clip) -> None:
        if event.inside_step:
            return
        keys = {state.key for state in event.parameters if state.used and not state.unknown}
        fresh = any(s.contributions > s.used or s.unknown for s in event.parameters)
        if not keys or fresh:
            return
        for optimizer in self.trace.optimizers:
            mine = any(state.key in keys for state in optimizer.parameters)
            if mine and optimizer.last_step > optimizer.last_backward:
                self.waiting[optimizer.key] = (event, optimizer.steps)
                self.example[optimizer.key] = (optimizer.last_step_site, event.limit, event.norm)

    def on_zero_grad(self, event: ev.ZeroGrad) -> None:
        # A step whose closure computes the gradients clears them there.
        zeroed = {state.key for state in event.parameters} if event.inside_step else set()
        for key, (clip, _) in list(self.waiting.items()):
            if any(state.key in zeroed for state in clip.parameters):
                self.confirmed[key].add(clip.site)
                del self.waiting[key]

    def on_step_begin(self, event: ev.StepBegin) -> None:
        if event.closure:
            return
        keys = {state.key for state in event.optimizer.parameters}
        for key, (clip, _) in list(self.waiting.items()):
            clipped = [state for state in clip.parameters if state.key in keys]
            if not clipped:
                continue
            # Another optimizer, or the same one, may be about to use what was clipped.
            if all(state.used == 0 for state in clipped) and key == event.optimizer.key:
                self.confirmed[key].add(clip.site)
            del self.waiting[key]

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            tally = self.confirmed.get(optimizer.key)
            if tally is None or tally.count < min(LEAST, max(optimizer.steps - 1, 1)):
                continue
            # The clip that follows the very last step has no step after it to confirm it.
            count = tally.count + (optimizer.key in self.waiting)
            step_site, limit, norm = self.example[optimizer.key]
            measured = "" if norm is None else f"; the norm was {norm:.3g} before the last clip"
            yield self.report(
                f"Clip to {limit:g} comes after {optimizer.kind}.step() at line {step_site.line},"
                f" after {share(count, optimizer.steps)} updates{measured}. The clipped gradients"
                " were cleared without being used.",
                tally.site,
                updates=optimizer.steps,
                clips_after_step=count,
                step_line=step_site.line,
                limit=limit,
                norm_before_clip=norm,
                fix=f"Move the clip between backward() and the step at line {step_site.line}.",
            )
