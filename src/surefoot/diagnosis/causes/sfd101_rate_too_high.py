"""SFD101: the learning rate is too high for the whole run."""

from __future__ import annotations

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals


class RateTooHigh(Cause):
    """Divergence, or up and down without a trend."""

    info = CauseInfo(
        code="SFD101",
        slug="rate-too-high",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="The learning rate is too high: the loss diverges, or bounces without a trend.",
        observes="Level and noise of the loss against its own start.",
        why="A step longer than the curvature allows goes uphill: the loss grows until it is"
        " infinite, or bounces from side to side of a valley.",
        fix="Halve the learning rate, or take a tenth of it; then a warm-up, clipping to norm 1.0,"
        " momentum or larger batches.",
        source="https://arxiv.org/abs/2103.00065 (edge of stability: step size against curvature)",
        needs=("loss",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss = signals.loss
        if not signals.has_shape:
            return None
        if loss.end > loss.start + max(0.2 * abs(loss.start), 3 * loss.noise):
            return Verdict(
                f"The loss began at {loss.start:.4g} and ends at {loss.end:.4g}.",
                weight=0.8,
                evidence={"first_loss": loss.start, "last_loss": loss.end},
            )
        return None
