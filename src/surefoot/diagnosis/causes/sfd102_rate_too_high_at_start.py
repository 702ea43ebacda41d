"""SFD102: the first updates run at full rate."""

from __future__ import annotations

import math

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import running_median, spread
from surefoot.diagnosis.signals import Signals

EARLY = 12
"""Rows in which a run without a warm-up breaks, if it breaks."""
LASTING = 5
"""First rows whose median stands above the start: weights that were thrown off are not back at
once, one hard batch is."""
JUMP = 0.2
"""Share of the first loss by which they do."""
AFTER = 40
"""Rows after those whose noise says how much a batch differs from the next."""
LONG = 0.35
"""Share of the run that a recovery takes at most."""
FAR = 0.8
"""Times the first loss by which the first rows stand above it, added up, where gradients grew by
more than a hard batch makes them."""
FARTHER = 2.0
"""The same, where gradients were not recorded."""
BEYOND = 1.3
"""Times the root of the loss's growth, which a hard batch gives a gradient of squared errors."""
KICK = 0.3
"""Share of the first loss by which it rises with the first update, or the second."""
KICKED = 4.0
"""Times the first gradient norm that the gradient has then."""
NEAR_GUESS = 0.1
"""Share by which the first loss is off log(C) at most, where it is that of a guess."""
WORSE = 1.5
"""Times that above which it has gone wrong for sure."""
THROWN = 1.2
"""Times the first loss that the first updates make of it, where they throw the weights."""
LEARNT = 0.1
"""Share of the first loss by which it fell at least, where it is no matter of all the run."""
RECOVERED = 0.2
"""Share of the first loss by which it falls below, where it does recover at the same rate."""


class RateTooHighAtStart(Cause):
    """The first updates run at full rate, without a warm-up, and the loss jumps up."""

    info = CauseInfo(
        code="SFD102",
        slug="rate-too-high-at-start",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="The first updates run at full rate, without a warm-up, and the loss jumps up.",
        observes="The loss of the first updates against the very first, the rate of the first"
        " update against its peak, and what the loss does afterwards; how far those updates threw"
        " the weights. Quiet where the rate warms"
        " up, the loss stays high, or only one or two later batches do.",
        why="At random weights gradients are large and Adam has no statistics yet: a full step"
        " throws the weights to where learning is slow, or the loss is no longer finite.",
        fix="Warm up over the first 1 to 5 % of the updates (schedule.warmup); clip to norm 1.0; a"
        " lower peak rate.",
        source="https://arxiv.org/abs/1706.02677 (gradual warm-up),"
        " https://arxiv.org/abs/1908.03265 (RAdam: variance of the first steps)",
        needs=("loss",),
        explains=(
            "schedule-ends-early",
            "rate-too-high",
            "exploding-gradients",
            "bad-batch",
            "underfitting",
            "rate-too-high-late",
            "labels-unrelated",
            "vanishing-gradients",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        if signals.starts_at_full_rate is False:
            return None
        loss, initial = signals.loss, signals.initial
        broke = signals.broke_at
        rows = signals.recording.num_rows
        if broke is not None:
            if signals.growth_before_break < 1.5 or len(signals.before_row("loss", broke)) > EARLY:
                return None
            step = signals.step_of_row(broke)
            return Verdict(
                f"The loss is no longer finite at step {step}, after it had grown to"
                f" {signals.growth_before_break:.3g} times its first value, with the full rate from"
                f" the"
                " first update on.",
                weight=0.9,
                evidence={"step": step, "first_loss": initial},
            )
        if not signals.has_shape:
            return None
        first = loss.values[1 : max(4, len(loss) // 20) + 1]
        if (thrown := _thrown(signals, float(first.max()))) is not None:
            return thrown
        noise = _noise_after(signals)
        if signals.begins_at_start:
            is_lowest = loss.values[0] < first[:LASTING].min()
            initial = float(loss.values[0] if is_lowest else max(initial, loss.values[0]))
        peak = float(first.max())
        hump = float(running_median(first, LASTING).max()) - initial
        jump = max(JUMP * abs(initial), 5 * signals.early_noise)
        over = float(np.maximum(first[: 2 * LASTING] - initial, 0).sum())
        grows = _gradients_grow(signals, peak / initial if initial > 0 else 1.0)
        far = over > max((FARTHER if grows is None else FAR) * abs(initial), 10 * noise)
        far = far and grows is not False and peak - initial > max(FAR / 2 * abs(initial), 5 * noise)
        lasts = peak - initial > jump and hump > max(jump / 2, JUMP * abs(initial))
        kicked = signals.starts_at_full_rate is True and _first_update_kicks(
            signals, initial, noise
        )
        if not (lasts or far or kicked or _is_worse_than_a_guess(signals, peak)):
            return None
        if signals.gradients_explode_at_once and hump < 10 * loss.noise:
            return None
        # Where rows stand as high as often in the later half, it is no matter of the start.
        high = initial + max(hump, jump) / 2
        if float((loss.part(0.5, 1) > high).mean()) > 0.5 * float((first > high).mean()):
            return None
        level = initial + 0.15 * abs(initial)
        above = float((loss.smooth > level).mean())
        falls = loss.end < initial - RECOVERED * abs(initial) and above < LONG
        if not falls and signals.rate_is_kept is not False:
            return None
        step = loss.step(1 + int(first.argmax()))
        known = (
            "" if signals.starts_at_full_rate is None else ", at full rate from the first update on"
        )
        return Verdict(
            f"The loss jumped from {initial:.4g} to {peak:.4g} at step {step}{known}; it ends at"
            f" {loss.end:.4g}.",
            weight=0.9 if signals.starts_at_full_rate else 0.6,
            evidence={
                "first_loss": initial,
                "peak_loss": peak,
                "peak_step": step,
                "last_loss": loss.end,
                "rows": rows,
            },
        )


def _thrown(signals: Signals, peak: float) -> Verdict | None:
    """Weights that the first updates, at full rate, threw to twice their norm and more, and none
    after them has moved as far. Where nothing was learnt at a rate that is kept, it is the rate of
    the whole run."""
    times = signals.weights_were_thrown
    if times is None or signals.starts_at_full_rate is not True:
        return None
    if signals.relative_drop < LEARNT and signals.rate_is_kept:
        return None
    loss = signals.loss
    # Small weights grow as fast at a good rate; then neither loss nor gradients jump.
    if peak < THROWN * abs(signals.initial):
        return None
    return Verdict(
        f"The first updates, at full rate, threw the weights to {times:.3g} times their norm; they"
        f" have stood there since. The loss went from {signals.initial:.4g} to {loss.end:.4g}.",
        weight=0.88,
        evidence={
            "weight_norm_growth_early": times,
            "weight_norm_growth": signals.weight_growth,
            "first_loss": signals.initial,
            "last_loss": loss.end,
        },
    )


def _first_update_kicks(signals: Signals, initial: float, noise: float) -> bool:
    """Whether the loss and the gradient norm shoot up with the very first update or the next."""
    loss, gradient = signals.loss.values, signals.gradient.values
    if len(gradient) < LASTING or gradient[0] <= 0 or not signals.begins_at_start:
        return False
    peak = float(loss[1:3].max()) - initial
    return peak > max(KICK * abs(initial), 8 * noise) and gradient[1:3].max() > KICKED * gradient[0]


def _is_worse_than_a_guess(signals: Signals, peak: float) -> bool:
    """Whether a loss that begins at log(C) is soon far above it: no batch is so hard to guess."""
    if signals.num_classes is None or signals.starts_at_full_rate is not True:
        return False
    guess = math.log(signals.num_classes)
    return abs(float(signals.loss.values[0]) / guess - 1) < NEAR_GUESS and peak > WORSE * guess


def _gradients_grow(signals: Signals, growth: float) -> bool | None:
    """Whether the gradient norm grew by more than that of a batch whose loss is as many times the
    first; None where it was not recorded."""
    values = signals.gradient.values[: 2 * LASTING]
    if len(values) < LASTING or values[0] <= 0:
        return None
    return bool(values[1:].max() > BEYOND * growth**0.5 * values[0])


def _noise_after(signals: Signals) -> float:
    """Noise of the rows that follow the first ones: half of what neighbours differ by."""
    values = signals.loss.values[LASTING : LASTING + AFTER]
    return spread(np.diff(values)) / 2**0.5 if len(values) > 2 else signals.early_noise
