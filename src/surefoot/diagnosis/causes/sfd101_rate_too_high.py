"""SFD101: the learning rate is too high for the whole run."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import running_median
from surefoot.diagnosis.signals import FLAT, Signals

ABOVE = 0.03
"""Share of the first loss by which the last one is above it at least."""
MOVED = 0.05
"""Share of their norm by which weights move at a rate that is too high, at least."""
STEADY = 0.01
"""Noise over level of a loss that does not bounce."""
CALM = 0.005
"""Share of their level by which evaluations bend, where no weight bounces."""
SHAKEN = 0.25
"""Times the noise of batches by which evaluations of the same samples bend, where weights do."""
THROWN = 2.0
"""Times the first loss that the first updates made of it, where they threw the weights far off."""
LASTING = 5
"""Rows whose median has jumped: weights that were thrown off are not back at once."""
LONG = 0.2
"""Share of the run that the loss stood above its start at least."""
LOST = 0.25
"""Share of what had been gained that is lost again at a rate that is kept."""
AWAY = 0.05
"""Share of the run, after its first tenth, that a loss stood above its start while the rate was at
its highest, though it came back later."""
LOW = 0.3
"""Share of the first loss below which it has not begun to diverge."""
RAN = 3.0
"""Times their norm to which weights run within the first part of a run."""
LITTLE_FOR_IT = 0.2
"""Share of the first loss by which it came down at most, where the weights ran away."""
HALF = 0.5
"""The same, where they ran far."""
RAN_FAR = 8.0
"""Times their norm that is far."""
LITTLE = 0.4
"""Share of the first loss by which a bouncing one has come down at most."""
BOUNCE = 0.08
"""Share of all that was gained by which neighbouring evaluations bend."""


class RateTooHigh(Cause):
    """The learning rate is too high: the loss diverges, or bounces without a trend."""

    info = CauseInfo(
        code="SFD101",
        slug="rate-too-high",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="The learning rate is too high: the loss diverges, or bounces without a trend.",
        observes="Whether the loss ends, or breaks off, above where it began; how long it stood"
        " above it, and at which rate; whether it lost again what it had gained, or wanders far"
        " above its best; how much it had grown before the first NaN; whether evaluations of a flat"
        " loss bounce as much as batches do. Quiet where only the first updates jump up, and where"
        " gradients explode from the beginning.",
        why="A step longer than the curvature allows goes uphill: the loss grows until it is"
        " infinite, or bounces from side to side of a valley while the weights grow.",
        fix="Halve the learning rate, or take a tenth of it; then a warm-up, clipping to norm 1.0,"
        " momentum, larger batches.",
        source="https://arxiv.org/abs/2103.00065 (edge of stability: step size against curvature)",
        needs=("loss",),
        explains=(
            "bad-batch",
            "labels-unrelated",
            "underfitting",
            "rate-too-high-late",
            "exploding-gradients",
            "validation-differs",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        if signals.broke_at is not None:
            return _broken(signals)
        if signals.gradients_explode_at_once:
            return None
        motion = signals.weight_motion
        if signals.weights_known_from_start and motion is not None and motion < MOVED:
            return None
        if not signals.has_shape or signals.weight_motion == 0.0:
            return None
        loss, initial = signals.loss, signals.initial
        unsure = 3 * float(np.hypot(signals.initial_error, loss.error_of_median(loss.window)))
        higher = initial + max(0.15 * abs(initial), unsure if signals.initial_error else 0.0)
        above = float((loss.smooth > higher).mean())
        margin = max(ABOVE * abs(initial), 3 * loss.standard_error(), 2 * signals.initial_error)
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
        if rose > max(0.25 * abs(initial), 3 * signals.initial_error) or above > LONG:
            return Verdict(
                f"The loss began at {initial:.4g}, rose to {highest:.4g} around step {step} and"
                f" ends"
                f" at {loss.end:.4g}; it stood above its start for {above:.0%} of the run.",
                weight=0.9,
                evidence=evidence,
            )
        grown = signals.weight_growth is not None and signals.weight_growth > 3
        thrown = float(loss.values[: max(LASTING, len(loss) // 20)].max())
        if grown and signals.relative_drop < LITTLE_FOR_IT / 2 and thrown > THROWN * abs(initial):
            return Verdict(
                f"The loss jumped from {initial:.4g} to {thrown:.4g} within the first updates, the"
                f" weights grew to {signals.weight_growth:.3g} times their norm, and it has"
                f" learnt nothing since ({loss.end:.4g}).",
                weight=0.85,
                evidence=evidence,
            )
        if loss.noise < STEADY * abs(loss.end):
            return None
        peak = float(running_median(loss.values, LASTING).max())
        jumped = peak > initial + max(0.25 * abs(initial), 4 * loss.noise)
        near = 3 * FLAT if grown and jumped else FLAT
        calm = len(signals.validation) > 3 and signals.validation_sway < CALM
        bounces = rose > margin and not calm
        jumped = jumped and not signals.start_is_vague
        if bounces or (rose > -near * abs(initial) and (grown or jumped)):
            return Verdict(
                f"The loss bounces around {loss.end:.4g}, hardly lower than where it began"
                f" ({initial:.4g}), with a noise of {loss.noise:.2g} and no trend"
                + (
                    f"; the weights grew to {signals.weight_growth:.3g} times their norm."
                    if grown
                    else "."
                ),
                weight=0.75 if grown else 0.6,
                evidence=evidence,
            )
        sway = signals.validation_sway * abs(loss.end)
        if signals.is_flat_but_for_noise and not calm and sway > SHAKEN * loss.noise:
            return Verdict(
                f"The loss stays at {loss.end:.4g} (first {initial:.4g}); evaluations, the same"
                f" samples each time, bounce by {sway:.2g}, nearly as much as batches differ"
                f" ({loss.noise:.2g}): it is the weights.",
                weight=0.72,
                evidence={**evidence, "validation_sway": sway},
            )
        return _ran_away(signals, evidence) or _wanders(signals, evidence)


def _ran_away(signals: Signals, evidence: dict[str, float | None]) -> Verdict | None:
    """Weights that were thrown far out by the first part of the run, and hardly learnt since."""
    norms = signals.recording["weight_norm"].finite.values
    if len(norms) < 10 or norms[0] <= 0 or not signals.weights_known_from_start:
        return None
    early = float(norms[: max(2, len(norms) // 4)].max() / norms[0])
    learnt = signals.relative_drop
    if early < RAN or signals.evaluations_are_steady:
        return None
    if not 0 < learnt < (HALF if early > RAN_FAR else LITTLE_FOR_IT):
        return None
    return Verdict(
        f"The weights grew to {early:.3g} times their norm within the first quarter of the run; the"
        f" loss came down by {learnt:.0%} only, from {signals.initial:.4g} to"
        f" {signals.loss.end:.4g}.",
        weight=0.74,
        evidence={**evidence, "weight_norm_growth_early": early},
    )


def _wanders(signals: Signals, evidence: dict[str, float | None]) -> Verdict | None:
    """Bounded wandering at a rate that is kept, or until it has decayed."""
    loss, initial = signals.loss, signals.initial
    if signals.rate_is_kept is None or initial <= 0 or signals.is_flat_but_for_noise:
        return None
    tenth = len(loss) // 10
    away = loss.smooth[tenth:] > 1.15 * initial
    if away.mean() > AWAY and float(loss.values.max()) > 3 * initial and _at_high_rate(signals):
        return Verdict(
            f"The loss stood above its start ({initial:.4g}) for {away.mean():.0%} of the run while"
            f" the rate was at its highest, {loss.values.max():.4g} at worst, and came back as the"
            f" rate decayed ({loss.end:.4g}).",
            weight=0.85,
            evidence=evidence,
        )
    if not signals.rate_is_kept:
        return None
    gained, lost = initial - loss.lowest, loss.end - loss.lowest
    low_at, early = loss.step(loss.lowest_at), loss.lowest_at < 0.7 * len(loss)
    if early and gained > 0.1 * initial and lost > max(LOST * gained, 4 * loss.standard_error()):
        return Verdict(
            f"The loss had come from {initial:.4g} to {loss.lowest:.4g} around step {low_at} and is"
            f" back at {loss.end:.4g}, while the rate is what it was: one step too long has thrown"
            " the weights out of what they had learnt.",
            weight=0.8,
            evidence=evidence,
        )
    jitter = signals.validation_jitter
    flat = loss.level(0.5, 0.75) - loss.end < 0.35 * (initial - loss.end)
    if jitter > BOUNCE and flat and FLAT < signals.relative_drop < LITTLE:
        return Verdict(
            f"The loss came from {initial:.4g} to {loss.end:.4g} and wanders there; evaluations,"
            f" the same samples each time, bounce by {jitter:.0%} of all that was gained.",
            weight=0.76,
            evidence={**evidence, "validation_jitter": jitter},
        )
    return None


def _at_high_rate(signals: Signals) -> bool:
    """Whether the loss was highest where the rate was: the rate there is over half its peak, and
    the run ended with less."""
    loss, rate = signals.loss, signals.rate
    step = loss.step(int(loss.smooth.argmax()))
    there = float(np.interp(step, rate.series.steps, rate.values))
    return there > 0.5 * float(rate.values.max()) and signals.rate_is_kept is False


def _broken(signals: Signals) -> Verdict | None:
    assert signals.broke_at is not None
    growth = signals.growth_before_break
    before = signals.before_row("loss", signals.broke_at)
    if growth < 3 or not len(before):
        return None
    if float(before[-3:].max()) < LOW * signals.initial and signals.initial > 0:
        return None  # Once a loss is low, single batches differ by factors.
    step = signals.step_of_row(signals.broke_at)
    return Verdict(
        f"Loss and gradients are no longer finite at step {step}; just before they had grown to"
        f" {growth:.3g} times their usual size (loss {before[-1]:.4g}).",
        weight=0.8,
        evidence={"step": step, "growth": growth, "loss_before": float(before[-1])},
    )
