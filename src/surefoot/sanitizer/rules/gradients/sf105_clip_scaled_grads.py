"""SF105: clipping gradients of a scaled loss."""

from __future__ import annotations

from collections import Counter, defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site, share

LARGE = 32.0
"""Nobody limits the norm of gradients as they are to more than this."""
PART = 0.05


class ClipScaledGrads(Rule):
    """Clip on gradients whose scale is pending."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.scaled: Counter[Site] = Counter()
        self.all: Counter[Site] = Counter()
        self.scale: float | None = None
        self.limit = 0.0
        self.settings: dict[Site, set[tuple[float, float]]] = defaultdict(set)
        """Limits and scales that came together."""

    def on_clip(self, event: ev.Clip) -> None:
        if event.inside_step:
            return
        self.all[event.site] += 1
        if any(s.scale_pending and s.contributions and not s.unknown for s in event.parameters):
            self.scaled[event.site] += 1
            self.limit = event.limit
            scales = [s.scale for s in self.trace.scalers if s.scale is not None]
            self.scale = scales[-1] if scales else None
            if scales and len(self.settings[event.site]) < 64:
                self.settings[event.site].add((event.limit, scales[-1]))

    def findings(self) -> Findings:
        for site, count in self.scaled.items():
            if count < min(3, self.all[site]) or _goes_with_scale(self.settings[site]):
                continue
            scale = "" if self.scale is None else f" of {self.scale:g}"
            yield self.report(
                f"Clip to {self.limit:g} of gradients that carry the loss scale{scale}, in"
                f" {share(count, self.all[site])} calls: unscale_() did not run before.",
                site,
                clips=self.all[site],
                scaled=count,
                scale=self.scale,
            )


def _goes_with_scale(settings: set[tuple[float, float]]) -> bool:
    """Whether the limit is in the units of the scaled gradients."""
    if len({scale for _, scale in settings}) > 1:
        shares = [limit / scale for limit, scale in settings]
        return max(shares) <= 1.01 * min(shares)
    return any(limit >= max(LARGE, PART * scale) for limit, scale in settings)
