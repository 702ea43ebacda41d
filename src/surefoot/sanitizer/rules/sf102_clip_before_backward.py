"""SF102: clipping where there are no gradients yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.trace import Trace

LEAST = 3
SHARE = 0.8


class ClipBeforeBackward(Rule):
    """Clip while every gradient is None or cleared."""

    info = RuleInfo(
        code="SF102",
        slug="clip-before-backward",
        certainty=Certainty.PROOF,
        title="Gradients are clipped before there are any.",
        observes="A clip whose parameters hold no gradient, or a cleared one, again and again."
        " Quiet inside one optimizer step (closures) and for a first call.",
        why="A clip of nothing does nothing; the gradients of the later backward() are used"
        " unclipped.",
        example="optimizer.zero_grad()\nclip_grad_norm_(model.parameters(), 1.0)\n"
        "loss.backward()\noptimizer.step()",
        fix="Move the clip behind backward(), before step().",
        source="Follows from what backward() and clip_grad_norm_ do.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.empty: Counter[Site] = Counter()
        self.all: Counter[Site] = Counter()

    def on_clip(self, event: ev.Clip) -> None:
        if event.inside_step or not event.parameters:
            return
        self.all[event.site] += 1
        if not any(s.contributions or s.unknown for s in event.parameters):
            self.empty[event.site] += 1

    def findings(self) -> Iterable[Finding]:
        for site, count in self.empty.items():
            if count < LEAST or count < SHARE * self.all[site]:
                continue
            yield self.report(
                f"In {share(count, self.all[site])} calls of this clip no parameter had a"
                " gradient: it runs before backward() and does nothing.",
                site,
                evidence={"clips": self.all[site], "without_gradient": count},
            )
