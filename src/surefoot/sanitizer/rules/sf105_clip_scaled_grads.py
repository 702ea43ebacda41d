"""SF105: clipping gradients of a scaled loss."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.trace import Trace

LARGE = 32.0
"""Nobody limits the norm of gradients as they are to more than this."""
PART = 0.05


class ClipScaledGrads(Rule):
    """Clip on gradients whose scale is pending."""

    info = RuleInfo(
        code="SF105",
        slug="clip-scaled-grads",
        certainty=Certainty.PROOF,
        title="Gradients are clipped while they still carry the loss scale.",
        observes="A clip of gradients that come from a loss scaled by a GradScaler, with no"
        " unscale_() between. Quiet for a scale of exactly 1, a disabled scaler, gradients that"
        " were divided by hand, and a limit that is multiplied by the scale.",
        why="A scaled gradient is thousands of times too long, so it is always clipped, and after"
        " the scaler has divided it nearly nothing is left.",
        example="scaler.scale(loss).backward()\nclip_grad_norm_(params, 1.0)\n"
        "scaler.step(optimizer)",
        fix="Call scaler.unscale_(optimizer) before the clip.",
        source="https://github.com/pytorch/examples/issues/1196",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
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

    def findings(self) -> Iterable[Finding]:
        for site, count in self.scaled.items():
            if count < min(3, self.all[site]) or _goes_with_scale(self.settings[site]):
                continue
            scale = "" if self.scale is None else f" of {self.scale:g}"
            yield self.report(
                f"Clip to {self.limit:g} of gradients that carry the loss scale{scale}, in"
                f" {share(count, self.all[site])} calls: unscale_() did not run before.",
                site,
                evidence={"clips": self.all[site], "scaled": count, "scale": self.scale},
            )


def _goes_with_scale(settings: set[tuple[float, float]]) -> bool:
    """Whether the limit is in the units of the scaled gradients."""
    if len({scale for _, scale in settings}) > 1:
        shares = [limit / scale for limit, scale in settings]
        return max(shares) <= 1.01 * min(shares)
    return any(limit >= max(LARGE, PART * scale) for limit, scale in settings)
