"""SFD101: the learning rate is too high for the whole run."""

from __future__ import annotations

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import FLAT, Signals

ABOVE = 0.03
"""Share of the first loss by which the last one is above it at least."""
MOVED = 0.05
"""Share of their norm by which weights move at a rate that is too high, at least."""
STEADY = 0.01
"""Noise over level of a loss that does not bounce."""
LONG = 0.2
"""Share of the run that the loss stood above its start at least."""


class RateTooHigh(Cause):
    """The learning rate is too high: the loss diverges, or bounces without a trend."""

    info = CauseInfo(
        code="SFD101",
        slug="rate-too-high",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="The learning rate is too high: the loss diverges, or bounces without a trend.",
        observes="Whether the loss ends, or breaks off, above where it began; how long it stood"
        " above it; how much it had grown before the first NaN. Quiet where only the first updates"
        " jump up.",
        why="A step longer than the curvature allows goes uphill: the loss grows until it is"
        " infinite, or bounces from side to side of a valley while the weights grow.",
        fix="Halve the learning rate, or take a tenth of it; then a warm-up, clipping to norm 1.0,"
        " momentum, larger batches.",
        source="https://arxiv.org/abs/2103.00065 (edge of stability: step size against curvature)",
        needs=("loss",),
        explains=(
            "bad-batch",
            "labels-unrelated",
            "rate-too-high-late",
            "exploding-gradients",
            "validation-differs",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        if signals.broke_at is not None:
            return _broken(signals)
        motion = signals.weight_motion
        if signals.weights_known_from_start and motion is not None and motion < MOVED:
            return None
        if not signals.has_shape or signals.weight_motion == 0.0:
            return None
        loss, initial = signals.loss, signals.initial
        above = float(
            (loss.smooth > initial * 1.15 if initial > 0 else loss.smooth > initial).mean()
        )
        margin = max(ABOVE * abs(initial), 3 * loss.standard_error())
        rose = loss.end - initial
        highest = float(loss.smooth.max())
        evidence = {
            "first_loss": initial,
            "last_loss": loss.end,
            "highest_level": highest,
            "share_above_first": above,
            "weight_norm_growth": signals.weight_growth,
        }
        step = loss.step(int(loss.smooth.argmax()))
        if rose > 0.25 * abs(initial) or above > LONG:
            return Verdict(
                f"The loss began at {initial:.4g}, rose to {highest:.4g} around step {step} and"
                f" ends"
                f" at {loss.end:.4g}; it stood above its start for {above:.0%} of the run.",
                weight=0.9,
                evidence=evidence,
            )
        grown = signals.weight_growth is not None and signals.weight_growth > 3
        if loss.noise < STEADY * abs(loss.end):
            return None
        jumped = float(loss.values.max()) > 1.5 * abs(initial)
        if rose > margin or (rose > -FLAT * abs(initial) and (grown or jumped)):
            return Verdict(
                f"The loss bounces around {loss.end:.4g}, no lower than where it began"
                f" ({initial:.4g}), with a noise of {loss.noise:.2g} and no trend"
                + (
                    f"; the weights grew to {signals.weight_growth:.3g} times their norm."
                    if grown
                    else "."
                ),
                weight=0.75 if grown else 0.6,
                evidence=evidence,
            )
        return None


def _broken(signals: Signals) -> Verdict | None:
    assert signals.broke_at is not None
    growth = signals.growth_before_break
    before = signals.before_row("loss", signals.broke_at)
    if growth < 3 or not len(before):
        return None
    step = signals.step_of_row(signals.broke_at)
    return Verdict(
        f"Loss and gradients are no longer finite at step {step}; just before they had grown to"
        f" {growth:.3g} times their usual size (loss {before[-1]:.4g}).",
        weight=0.8,
        evidence={"step": step, "growth": growth, "loss_before": float(before[-1])},
    )
