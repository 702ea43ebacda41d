"""SFD201: the gradient norm shoots up again and again."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import median_before, spikes
from surefoot.diagnosis.signals import Signals

SPIKE = 6.0
"""Times the median of the rows before."""
BEYOND = 3.0
"""Times the growth of the row's loss: where a batch is hard, both grow alike."""
LOW = 0.3
"""Share of the first loss below which single batches differ by factors."""
FAR = 2
"""Updates at least that are ten times as high: a single one is a hard batch."""
GROWTH = 8.0
"""Factor by which a norm grows over a run that explodes slowly."""
STEEP = 50.0
"""Relative change of the first loss for one of the weights: with weights in scale it is a few, in a
deep network some tens."""
STEEPER = 3 * STEEP
"""The same, where nothing else is odd but how large the gradients are, and stay."""
LARGE = 15.0
"""Gradient norm over the first loss that is so."""
AT_ONCE = 3
"""Rows before the first that is not finite, of a run that began out of scale."""
UNSTEADY = 2.0
"""Factor between the norms of neighbouring batches, in the median."""
TIMES_A_GUESS = 2.5
"""Times the loss of a guess with which no run in scale begins."""
MANY_TOKENS = 50_000
"""Size of a vocabulary that nobody told."""
FALLEN = 0.1
"""Median of the early norms over the first: one that is lower has vanished."""
FIRST = 20
"""Rows, or a tenth of the run, for which it is looked at."""


class ExplodingGradients(Cause):
    """The gradient norm shoots up again and again."""

    info = CauseInfo(
        code="SFD201",
        slug="exploding-gradients",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="The gradient norm shoots up again and again.",
        observes="Rows whose gradient norm is ten times the median of those before them, and how"
        " many; or a norm that has grown tenfold over the run. Quiet for one or a few batches, for"
        " hard batches of a low loss, and where the loss had already left its range.",
        why="The gradient is a product over layers: without normalisation, or after a bad"
        " initialisation, it is now and then many times what it was, and one such update undoes"
        " hundreds.",
        fix="Clip to norm 1.0 (train.clip_norm) and log the share of clipped updates; then"
        " normalisation, a smaller initialisation, a lower rate, a warm-up.",
        source="https://arxiv.org/abs/1211.5063 (exploding gradients and norm clipping)",
        needs=(
            "loss",
            "grad_norm",
        ),
        explains=(
            "bad-batch",
            "labels-unrelated",
            "rate-too-low",
            "underfitting",
            "validation-differs",
            "vanishing-gradients",
            "rate-too-high-at-start",
            "non-finite-loss-function",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        gradient = signals.gradient
        if (overflows := _overflows_at_once(signals)) is not None:
            return overflows
        if len(gradient) < 20 or not signals.has_shape:
            return None
        found = _beyond_the_loss(signals, spikes(gradient.series, SPIKE))
        share = len(found) / len(gradient)
        usual = float(np.median(gradient.values))
        worst = max(found, key=lambda position: gradient.values[position], default=0)
        # Ten times nothing, after the gradients have faded, explodes nowhere.
        bar = max(10 * usual, 3 * float(np.median(gradient.part(0, 0.1))))
        far = int((gradient.values[found] > bar).sum())
        if len(found) >= 4 and share > 0.015 and far >= FAR:
            return Verdict(
                f"{len(found)} of {len(gradient)} updates have a gradient norm of more than"
                f" {SPIKE:g} times the usual ({usual:.3g}); the worst is"
                f" {gradient.values[worst]:.3g} at step"
                f" {gradient.step(worst)}.",
                # So they were before any weight had moved: it is no rate that made them.
                weight=0.91 if signals.gradients_explode_at_once else 0.87,
                evidence={
                    "spikes": len(found),
                    "median_grad_norm": usual,
                    "worst_grad_norm": float(gradient.values[worst]),
                    "worst_step": gradient.step(worst),
                    "first_steps": [gradient.step(position) for position in found[:8]],
                },
            )
        if (at_once := _out_of_scale(signals)) is not None:
            return Verdict(
                f"Before any weight had moved, the gradient norm was {gradient.values[0]:.3g}: a"
                f" change of the weights by 1 % is one of the loss by {at_once:.0f} %. The loss"
                f" begins at {signals.loss.values[0]:.4g}; the highest norm is"
                f" {gradient.values.max():.3g}.",
                # No rate has made it so.
                weight=0.92,
                evidence={
                    "first_grad_norm": float(gradient.values[0]),
                    "relative_change_of_loss": at_once,
                    "worst_grad_norm": float(gradient.values.max()),
                },
            )
        early = float(np.median(gradient.part(0, 0.1)))
        if early > 0 and gradient.end > GROWTH * early and gradient.end > 10:
            return Verdict(
                f"The gradient norm has grown from {early:.3g} to {gradient.end:.3g} over the run.",
                weight=0.6,
                evidence={"early_grad_norm": early, "last_grad_norm": gradient.end},
            )
        return None


def _overflows_at_once(signals: Signals) -> Verdict | None:
    """A first loss many times that of a guess, and nothing finite after the first updates."""
    broke = signals.broke_at
    if broke is None or not len(signals.loss) or not _is_no_guess(signals):
        return None
    if len(signals.before_row("loss", broke)) > AT_ONCE:
        return None
    step, first = signals.step_of_row(broke), float(signals.loss.values[0])
    return Verdict(
        f"The loss begins at {first:.4g}, many times that of a guess, and at step {step} gradients"
        " are no longer finite: the weights were out of scale before the first update.",
        weight=0.9,
        evidence={"first_loss": first, "step": step},
    )


def _out_of_scale(signals: Signals) -> float | None:
    """The relative change of the very first loss for one of the weights, where that is far too
    much, and the gradient of each batch is another, the loss far above that of a guess, or the
    gradient as large to the end."""
    loss, gradient = signals.loss, signals.gradient
    if not signals.begins_at_start or not signals.weights_known_from_start or loss.values[0] <= 0:
        return None
    if signals.weights_were_thrown is not None:
        return None
    weights = float(signals.recording["weight_norm"].finite.values[0])
    steep = float(gradient.values[0]) * weights / float(loss.values[0])
    early = gradient.values[: max(FIRST, len(gradient) // 10)]
    factor = float(np.median(np.abs(np.diff(np.log(np.maximum(early, 1e-30))))))
    # One that falls to nothing differs by factors, too.
    unsteady = factor > np.log(UNSTEADY) and np.median(early) > FALLEN * early[0]
    stays = float(np.median(gradient.values)) > LARGE * float(loss.values[0])
    stays = stays and steep > STEEPER
    return steep if steep > STEEP and (unsteady or stays or _is_no_guess(signals)) else None


def _is_no_guess(signals: Signals) -> bool:
    """Whether a loss over classes, or a vocabulary, begins at several times that of a guess."""
    classes = signals.num_classes or (MANY_TOKENS if signals.is_language else None)
    if classes is None:
        return False
    return float(signals.loss.values[0]) > TIMES_A_GUESS * float(np.log(classes))


def _beyond_the_loss(signals: Signals, found: list[int]) -> list[int]:
    """Those spikes at which the loss has not grown alike: once a loss is low, a hard batch has many
    times as much of both."""
    series, loss = signals.gradient.series, signals.loss.series
    usual_loss = median_before(loss.values)
    usual_norm = median_before(series.values)
    left = []
    for position in found:
        place = int(np.searchsorted(loss.rows, series.rows[position]))
        is_row = place < len(loss) and loss.rows[place] == series.rows[position]
        is_low = is_row and 0 < usual_loss[place] < LOW * signals.initial
        harder = loss.values[place] / usual_loss[place] if is_low else 1.0
        if series.values[position] > BEYOND * max(1.0, harder) * usual_norm[position]:
            left.append(position)
    return left
