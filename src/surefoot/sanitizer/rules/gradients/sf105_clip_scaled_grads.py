"""SF105: clipping gradients of a scaled loss."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Looks, Rule, Site, share

LEAST = 3
SCALED_LIMIT = 32.0
"""Nobody limits the norm of gradients as they are to more than this."""
SCALED_SHARE = 0.05
MOST_SETTINGS = 64


class ClipScaledGrads(Rule, page=__file__):
    """A clip of gradients that a GradScaler scaled and that nobody unscaled."""

    def setup(self) -> None:
        self.clips = Looks[Site]()
        self.scale: float | None = None
        self.limit = 0.0
        self.settings: dict[Site, set[tuple[float, float]]] = defaultdict(set)
        """Limits and scales that came together."""

    def on_clip(self, event: ev.Clip) -> None:
        if event.inside_step:
            return
        states = event.parameters
        scaled = any(s.scale_pending and s.contributions and not s.unknown for s in states)
        self.clips.add(event.site, scaled)
        if scaled:
            scales = [s.scale for s in self.trace.scalers if s.scale is not None]
            self.limit, self.scale = event.limit, scales[-1] if scales else None
            if scales and len(self.settings[event.site]) < MOST_SETTINGS:
                self.settings[event.site].add((event.limit, scales[-1]))

    def findings(self) -> Findings:
        for site, count, clips in self.clips.often(1, 0.0):
            if count < min(LEAST, clips) or _goes_with_scale(self.settings[site]):
                continue
            scale = "" if self.scale is None else f" of {self.scale:g}"
            message = (
                f"Clip to {self.limit:g} of gradients that carry the loss scale{scale}, in"
                f" {share(count, clips)} calls: unscale_() did not run before."
            )
            yield self.report(message, site, clips=clips, scaled=count, scale=self.scale)


def _goes_with_scale(settings: set[tuple[float, float]]) -> bool:
    """Whether the limit is in the units of the scaled gradients."""
    if len({scale for _, scale in settings}) > 1:
        shares = [limit / scale for limit, scale in settings]
        return max(shares) <= 1.01 * min(shares)
    return any(limit >= max(SCALED_LIMIT, SCALED_SHARE * scale) for limit, scale in settings)
