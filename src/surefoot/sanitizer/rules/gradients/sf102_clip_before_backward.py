"""SF102: clipping where there are no gradients yet."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Looks, Rule, Site, share

LEAST = 3
SHARE = 0.8


class ClipBeforeBackward(Rule, page=__file__):
    """A clip while every gradient is None or cleared."""

    def setup(self) -> None:
        self.empty = Looks[Site]()

    def on_clip(self, event: ev.Clip) -> None:
        if not event.inside_step and event.parameters:
            held = any(s.contributions or s.unknown for s in event.parameters)
            self.empty.add(event.site, not held)

    def findings(self) -> Findings:
        for site, count, clips in self.empty.often(LEAST, SHARE):
            message = (
                f"In {share(count, clips)} calls of this clip no parameter had a gradient: it runs"
                " before backward() and does nothing."
            )
            yield self.report(message, site, clips=clips, without_gradient=count)
