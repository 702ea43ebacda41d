"""SFD403: the loss repeats a pattern each epoch."""

from __future__ import annotations

import itertools

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import spread
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.signals import Signals

ABOVE = 1.2
"""Times what varies from epoch to epoch by which the pattern swings at least."""
SURE = 4.0
"""The same, in standard errors of a correlation by chance."""
CUBIC = 12
"""Rows of an epoch from which on its trend may be a cubic."""
AGREE = 0.35
"""Correlation of the same places in two following epochs, at least."""

ALIKE = 0.25
"""Spread of an epoch's pattern over that of the largest, at least."""
AGREE_ONCE = 0.6
"""The same of two epochs alone: two stretches of a curve that learns may bend alike."""


class DataNotShuffled(Cause):
    """The loss repeats a pattern each epoch: the data come in the same, sorted order."""

    info = CauseInfo(
        code="SFD403",
        slug="data-not-shuffled",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="The loss repeats a pattern each epoch: the data come in the same, sorted order.",
        observes="The loss without its trend, folded at the epochs: how well the same place in two"
        " following epochs agrees. Quiet for fewer than three epochs.",
        why="Batches of one class after another pull the weights back and forth; BatchNorm"
        " statistics and evaluations show the last class only.",
        fix="Shuffle each epoch (loader shuffle=True, or DistributedSampler.set_epoch); with a"
        " stream, a shuffle buffer that is wider than a sorted stretch.",
        source="https://arxiv.org/abs/1206.5533 (Bengio: shuffle the examples)",
        needs=(
            "loss",
            "epoch",
        ),
        explains=(
            "bad-batch",
            "labels-unrelated",
            "rate-too-high",
            "exploding-gradients",
            "underfitting",
            "rate-too-high-late",
            "validation-differs",
            "rate-too-high-at-start",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        starts = signals.epoch_starts.astype(int)
        if len(starts) < 3:
            return None
        lengths = np.diff(starts)
        period = int(np.median(lengths))
        if period < 6:
            return None
        _, _, values = signals.recording.aligned("epoch", "loss")
        whole = [int(start) for start in starts if start + period <= len(values)]
        folds = [_without_trend(values[start : start + period]) for start in whole]
        folds = [fold for fold in folds if np.isfinite(fold).all() and fold.std() > 0]
        # A pattern of the data is about as large in each; what is left of a curve's bends is not.
        largest = max((float(fold.std()) for fold in folds), default=0.0)
        folds = [fold for fold in folds if fold.std() > ALIKE * largest]
        if len(folds) < 2:
            return None
        pairs = [float(np.corrcoef(a, b)[0, 1]) for a, b in itertools.pairwise(folds)]
        agreement = float(np.median(pairs))
        freedom = period - _degree(period) - 1
        bar = max(AGREE if len(pairs) > 1 else AGREE_ONCE, SURE / (freedom * len(pairs)) ** 0.5)
        if agreement < bar:
            return None
        profile = np.median(np.stack(folds), axis=0)
        left = spread((np.stack(folds) - profile).ravel())
        if np.ptp(profile) < max(0.005 * abs(signals.initial), ABOVE * left):
            return None
        return Verdict(
            f"The loss follows the same pattern in each of {len(folds)} epochs of {period} rows:"
            f" two"
            f" following epochs agree by {agreement:.0%} (a shuffled run: by chance); from its"
            f" lowest to"
            f" its highest place it swings by {np.ptp(profile):.3g}.",
            weight=0.88,
            evidence={
                "period_rows": period,
                "agreement": agreement,
                "swing": float(np.ptp(profile)),
            },
        )


def _degree(period: int) -> int:
    """Degree of an epoch's trend: a cubic, or a line where that would leave next to nothing."""
    return 3 if period >= CUBIC else 1


def _without_trend(values: Floats) -> Floats:
    """What is left of one epoch without its trend: that of a curve that falls."""
    if not np.isfinite(values).all():
        return np.full(len(values), np.nan)
    places = np.linspace(-1, 1, len(values))
    left: Floats = values - np.polyval(np.polyfit(places, values, _degree(len(values))), places)
    return left
