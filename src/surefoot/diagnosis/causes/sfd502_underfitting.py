"""SFD502: train and validation loss stall together, early and high."""

from __future__ import annotations

import math

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals

HIGH = 0.5
"""Share of the first loss that is left at least."""
STALLED = 0.045
"""Share of the whole way that is left at most after half of the run's rate."""
KEPT = 3
"""Times less than that at a rate that is kept: nothing is left for its decay to bring."""
STALLED_HIGH = 0.2
"""The same, where classes are few and the loss is high for so few."""
LEARNT = 0.05
"""Share of the first loss that was learnt at least."""
FEW = 14
"""Classes above which a loss of more than half of a guess's is what language models end with."""
HIGHER = 0.58
"""Share of the first loss that is left at least, where classes are few: above a good deal of wrong
labels."""
TOGETHER = 0.12
"""Share of the way by which train and validation loss differ at most: a model that is too small
learns nothing by heart, one that has come to the noise of its labels does."""
SWAYS = 0.02
"""Share of the way, and half of it of their level, by which evaluations of weights at rest bend."""
GOOD = 0.8
"""Accuracy from which on a loss is not high."""
SKILLED = 0.45
"""Accuracy, from 0 for a guess to 1, of a model that has learnt what noisy labels hold."""
GOOD_OF_MANY = 0.2
"""The same among many classes: characters cannot be foretold much better."""


class Underfitting(Cause):
    """Train and validation loss stall together, early and high."""

    info = CauseInfo(
        code="SFD502",
        slug="underfitting",
        severity=Severity.WARNING,
        certainty=Certainty.HEURISTIC,
        title="Train and validation loss stall together, early and high.",
        observes="Whether both stood still after the updates that had half of the run's rate,"
        " how far they had come, and whether they are close. Quiet where the loss still falls, if"
        " only as the rate decays (a little of that is allowed among few classes, where most of a"
        " guess's loss is left), and where the accuracy is good.",
        why="The model is too small for the task, or held back (weight decay, dropout); more"
        " updates bring nothing.",
        fix="A larger model first; less weight decay and dropout; check that the inputs hold what"
        " is asked for.",
        source="https://www.deeplearningbook.org/contents/ml.html (5.2 capacity)",
        needs=(
            "loss",
            "validation loss",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss, validation = signals.loss, signals.validation
        if not signals.has_shape or len(validation) < 5 or signals.broke_at is not None:
            return None
        if signals.relative_drop < LEARNT or loss.end < HIGH * signals.initial:
            return None
        many = math.log(FEW) < signals.initial
        if (signals.accuracy or 0.0) > (GOOD_OF_MANY if many else GOOD):
            return None
        # Of right answers so many that wrong labels may be all that is left.
        if signals.skill is not None and signals.skill > SKILLED:
            return None
        drop = signals.initial - loss.end
        held = float(np.median(validation.part(0.4, 0.6)))
        last = float(np.median(validation.values[-2:]))
        train = (loss.level(0.45, 0.6) - loss.level(0.85, 1.0)) / drop
        gap = (last - loss.end) / drop
        most = STALLED / KEPT if signals.rate_is_kept else STALLED
        if _guesses_on(signals):
            most = STALLED_HIGH
        stalled = -TOGETHER < signals.validation_left < most and train < max(2 * STALLED, most)
        sways = signals.validation_jitter > SWAYS and signals.validation_sway > SWAYS / 2
        if not stalled or not -2 * TOGETHER < gap < TOGETHER or sways:
            return None
        return Verdict(
            f"Train and validation loss stall together: {loss.level(0.45, 0.6):.4g} and {held:.4g}"
            f" at"
            f" half of the run, {loss.end:.4g} and {last:.4g} at its end (first"
            f" {signals.initial:.4g}).",
            weight=0.66,
            evidence={
                "first_loss": signals.initial,
                "train_at_half": loss.level(0.45, 0.6),
                "train_at_end": loss.end,
                "validation_at_half": held,
                "validation_at_end": last,
            },
        )


def _guesses_on(signals: Signals) -> bool:
    """Whether a loss that began at that of a guess among few classes ends not far below it: what
    the decay of the rate still brings does not make it a good one."""
    initial = signals.initial
    first = max(initial, float(signals.loss.values[0]))
    classes = signals.num_classes or math.exp(min(first, 20.0))
    few = 2.5 < classes < FEW and initial < 1.3 * math.log(classes) and not signals.is_language
    return few and signals.loss.end > HIGHER * initial
