"""SFD104: the loss barely moves, because each update is tiny."""

from __future__ import annotations

import math

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import straightness
from surefoot.diagnosis.signals import FLAT, Signals

STILL = 1e-3
"""Share of their norm by which weights that hardly moved have moved at most."""
SHORT = 50
"""Updates in which no rate brings a run far."""
STEADILY = -0.85
"""Straightness of a loss that has noise, and falls all the way."""
BEFORE = 0.8
"""What a line fell before it is looked at, over what it falls then, at most."""
LITTLE = 0.12
"""Share of the first loss that a run comes down whose rate is too low, at most."""
EVEN = 0.6
"""What the second half brings of what the first does, at least: a curve that learns bends."""
GUESS = 0.1
"""Share by which the first loss may be off log(C)."""
STILL_SUM = 0.02
"""Sum of the rates of all updates, where the weights' norm was not recorded."""


class RateTooLow(Cause):
    """The learning rate is too low: the loss barely moves, or falls in a straight line."""

    info = CauseInfo(
        code="SFD104",
        slug="rate-too-low",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="The learning rate is too low: the loss barely moves, or falls in a straight line.",
        observes="How far the loss came down, how straight its way is, and how far the weights"
        " have moved. Quiet where the weights did move, or no gradient is there to move them.",
        why="Each update is so small that the run is at the very beginning of what it could learn"
        " when it ends.",
        fix="Find the rate with a short range test (raise it until the loss no longer falls), or"
        " try ten times as much; check the unit of the warm-up.",
        source="https://arxiv.org/abs/1506.01186 (learning rate range test)",
        needs=(
            "loss",
            "lr",
        ),
        explains=("underfitting", "labels-unrelated"),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss = signals.loss
        if not signals.has_shape or signals.broke_at is not None or not len(signals.rate):
            return None
        if signals.weight_motion == 0.0 and not signals.rate_is_nothing:
            return None
        if signals.recording.last_step < SHORT:
            return None
        motion, total = signals.weight_motion, signals.rate_sum
        moved = f"{motion:.2g} of their norm" if motion is not None else "an unknown way"
        evidence = {
            "first_loss": signals.initial,
            "last_loss": loss.end,
            "relative_drop": signals.relative_drop,
            "weight_motion": motion,
            "sum_of_rates": total,
            "peak_rate": float(signals.rate.values.max()),
        }
        small = motion < STILL if motion is not None else total is not None and total < STILL_SUM
        near = motion is None or motion < 0.05
        flat = abs(signals.relative_drop) < 2 * FLAT or signals.is_flat_but_for_noise
        if flat and small and not signals.knows_more:
            return Verdict(
                f"The loss went from {signals.initial:.4g} to {loss.end:.4g} in"
                f" {signals.recording.last_step} updates; the weights moved by {moved} at a peak"
                f" rate"
                f" of {evidence['peak_rate']:.3g}.",
                weight=0.85,
                evidence=evidence,
            )
        if signals.begins_trained:
            return None  # A gentle fine-tuning falls as straight.
        line = straightness(loss.smooth)
        first = loss.level(0.1, 0.2) - loss.level(0.45, 0.55)
        second = loss.level(0.45, 0.55) - loss.level(0.9, 1.0)
        # Most of it in the first updates, and little by little since, is a curve, not a line.
        if signals.initial - loss.level(0.1, 0.2) > BEFORE * (first + second):
            return None
        clear = first + second > 4 * loss.standard_error()
        even = EVEN * first < second < first / EVEN
        straight = (line < -0.95 and even) or _straight_for_its_rate(signals)
        straight = (straight and clear) or _validation_is_straight(signals)
        little = LITTLE
        if (motion is not None and motion < STILL) or _begins_at_guess(signals):
            # From a guess on, a loss falls ever faster until it has learnt the first thing.
            little = 2 * LITTLE
            lasts = line < STEADILY and second > max(EVEN * first, 4 * loss.standard_error())
            straight = straight or lasts
        if straight and near and max(signals.relative_drop, _validated(signals)) < little:
            return Verdict(
                f"The loss falls in a nearly straight line, from {signals.initial:.4g} to"
                f" {loss.end:.4g} in {signals.recording.last_step} updates: the second half brings"
                f" as"
                f" much as the first ({second:.3g} and {first:.3g}).",
                weight=0.8,
                evidence={**evidence, "straightness": line},
            )
        return None


def _validated(signals: Signals) -> float:
    """Share of the first loss by which the validation loss came down."""
    values = signals.validation.values
    return 1 - float(values[-1]) / signals.initial if len(values) and signals.initial > 0 else 0.0


def _straight_for_its_rate(signals: Signals) -> bool:
    """Whether the loss falls in a line with the sum of the rates, and as much for the same sum."""
    loss, rate = signals.loss, signals.rate
    if len(rate) != len(loss) or float(loss.smooth.std()) == 0.0 or not rate.values.any():
        return False
    line = float(np.corrcoef(np.cumsum(rate.values), loss.smooth)[0, 1])
    first, second = signals.progress_per_rate(2)
    return line < -0.95 and first > 0 and EVEN * first < second < first / EVEN


def _validation_is_straight(signals: Signals) -> bool:
    """The same of the evaluations, which have no noise of batches, where the run began with a guess
    among a known number of classes: a gentle fine-tuning is as straight."""
    values, steps, rate = signals.validation.values, signals.validation.series.steps, signals.rate
    if len(values) < 8 or float(values.std()) == 0.0 or not rate.values.any():
        return False
    if not _begins_at_guess(signals):
        return False
    total = np.interp(steps, rate.series.steps, np.cumsum(rate.values))
    line = float(np.corrcoef(total, values)[0, 1])
    half = float(np.interp((total[0] + total[-1]) / 2, total, values))
    first, second = float(values[0]) - half, half - float(values[-1])
    return line < -0.99 and first > 0 and EVEN * first < second < first / EVEN


def _begins_at_guess(signals: Signals) -> bool:
    """Whether the first loss is that of a guess among so many classes."""
    guess = math.log(signals.classes_of_guess or 1)
    return abs(signals.initial - guess) < GUESS * guess
