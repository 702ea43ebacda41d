"""SFD402: labels do not belong to the inputs."""

from __future__ import annotations

import math

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import ranks, straightness
from surefoot.diagnosis.signals import FLAT, Signals

AT_GUESS = 0.03
"""Share by which a loss that is a guess's may be off log(C)."""
FELL = 0.15
"""Share of its first value by which a validation loss has fallen that has learnt for sure."""
STILL = 0.003
"""Share of its first value by which a validation loss that learns nothing falls at most."""
FALLS = -2.5
"""Trend of a loss that learns, in standard errors of the trend of mere noise."""
LITTLE_MOTION = 3e-3
"""Share of their norm by which weights have moved, that learn."""
STILL_MOTION = 1e-3
"""The same, where the loss is known to be a guess's: a fine-tuning moves them as little."""
VOCABULARY = 20
"""Classes from which on a loss comes down by their frequencies at all far."""
MANY_TOKENS = 0.08
"""Noise over level, at most, of a loss over the tokens of a batch."""
AT_REST = 0.02
"""Share of their norm by which weights grow at most, once frequencies are learnt; decay may shrink
them."""
SAME = 1e-4
"""Spread of the accuracies, at most, of a model that gives one answer to all."""
NOT_GOOD = 0.9
"""Accuracy below which they may be the share of one class."""
LITTLE_RATE = 0.02
"""Sum of the rates of all updates that moves no weight far: the start of a gentle fine-tuning."""


class LabelsUnrelated(Cause):
    """The labels do not belong to the inputs: the loss stays at that of a guess."""

    info = CauseInfo(
        code="SFD402",
        slug="labels-unrelated",
        severity=Severity.ERROR,
        certainty=Certainty.HEURISTIC,
        title="The labels do not belong to the inputs: the loss stays at that of a guess.",
        observes="A loss that stays where it was, or comes down to log(C), a guess among C classes,"
        " and stays there, though the weights move; or, over a vocabulary, soon comes to rest with"
        " the weights, as it does once frequencies are learnt. Quiet where they hardly moved, where"
        " the accuracy, or log(C), says that the level is not that of a guess; where the"
        " mean, or the validation loss, still comes down; and where the first rows tell nothing.",
        why="Where labels and inputs were shuffled apart or misread, there is nothing to learn but"
        " how often each label occurs.",
        fix="Look at twenty samples with their labels as the model gets them; check sorting,"
        " shuffling and joins between inputs and labels; overfit one batch: if that works, it is"
        " the labels.",
        source="https://arxiv.org/abs/1611.03530 (random labels),"
        " https://karpathy.github.io/2019/04/25/recipe/",
        needs=("loss",),
        explains=("underfitting",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss = signals.loss
        if signals.broke_at is not None or len(loss) < 20:
            return None
        by_frequency = _settles_at_frequencies(signals) or _answers_the_same(signals)
        settles = _settles_at_guess(signals) or by_frequency or _guesses_to_the_end(signals)
        if signals.knows_more and not by_frequency:
            return None
        if not signals.is_flat_but_for_noise and not settles:
            return None
        if float(loss.values.min()) < 0 or (not settles and _learns(signals)):
            return None
        if signals.start_is_vague and not _validation_stays(signals):
            return None
        motion, total = signals.weight_motion, signals.rate_sum
        if motion is not None and motion < (STILL_MOTION if _is_guess(signals) else LITTLE_MOTION):
            return None
        if total is not None and total < LITTLE_RATE:
            return None
        if signals.weight_growth is not None and signals.weight_growth > 3:
            return None
        margin = max(0.02 * abs(signals.initial), 3 * loss.standard_error())
        if loss.end > signals.initial + margin and not settles:
            return None
        validation = signals.validation
        text = ""
        if len(validation):
            text = f" {signals.validation_name}/loss stays, too ({validation.values[-1]:.4g})."
        known = motion is not None
        moves = (
            f"though the weights moved by {motion:.2g} of their norm"
            if known
            else "and the log does not say whether the weights move: it may be them"
        )
        return Verdict(
            f"The loss stays at {loss.end:.4g} (first {signals.initial:.4g}) over"
            f" {signals.recording.last_step} updates, {moves}.{text}",
            weight=0.7 if known else 0.5,
            evidence={
                "first_loss": signals.initial,
                "last_loss": loss.end,
                "weight_motion": motion,
                "median_grad_norm": signals.gradient.level(0, 1) if len(signals.gradient) else None,
            },
        )


def _learns(signals: Signals) -> bool:
    """Whether the mean loss comes down, though noise hides it from medians; or the validation loss,
    which has none, still falls in the second half."""
    loss, values = signals.loss, signals.validation.values
    gained = float(loss.part(0, 0.1).mean()) - float(loss.part(0.5, 1).mean())
    certain = signals.trend * len(loss) ** 0.5 < FALLS
    if certain and gained > 2 * FLAT * abs(signals.initial):
        return True
    if len(values) > 4 and float(np.median(values[-3:])) < (1 - FELL) * float(values[0]):
        return True
    if len(values) < 5 or straightness(ranks(values)) > -0.9:
        return False
    half = len(values) // 2
    first, second = float(values[0] - values[half]), float(values[half] - values[-1])
    fell = (first + second) / abs(float(values[0]) or 1.0)
    return fell > 10 * STILL or (fell > STILL and second > 0.25 * first)


def _validation_stays(signals: Signals) -> bool:
    values = signals.validation.values
    return len(values) > 3 and float(np.ptp(values)) < 2 * FLAT * abs(float(values[0]))


def _settles_at_frequencies(signals: Signals) -> bool:
    """Whether a loss over a vocabulary came down early and neither it nor a weight has moved since:
    how often each token occurs is soon learnt, and who learns more moves weights."""
    loss, weights = signals.loss, signals.recording["weight_norm"].finite.values
    if not signals.has_shape or signals.initial < math.log(VOCABULARY):
        return False
    if not 0.5 * signals.initial < loss.end or loss.noise > MANY_TOKENS * loss.end:
        return False
    rate = signals.rate
    early = not len(rate) or rate.part(0, 0.25).sum() < 0.5 * rate.values.sum()
    later = weights[len(weights) // 4 :]
    rests = len(later) > 5 and float(later.max()) < (1 + AT_REST) * float(later[0])
    if not early or not (rests or (not len(weights) and not len(signals.validation))):
        return False
    stands = abs(loss.level(0.25, 0.5) - loss.level(0.75, 1)) < 3 * loss.standard_error(0.25)
    return stands and abs(signals.trend) * len(loss) ** 0.5 < -FALLS


def _guesses_to_the_end(signals: Signals) -> bool:
    """Whether the loss stands for most of the run, and the accuracy is what a guess with that loss
    has, at the end as in the beginning."""
    loss, accuracies = signals.loss, signals.accuracies
    if not signals.has_shape or len(accuracies) < 4 or not 0 < loss.end < 3:
        return False
    guess = math.exp(-loss.end)
    stands = abs(loss.level(0.3, 0.6) / loss.end - 1) < AT_GUESS
    later = float(accuracies[len(accuracies) // 2 :].mean())
    return stands and later < 1.4 * guess and abs(signals.relative_drop) < 2 * FLAT


def _answers_the_same(signals: Signals) -> bool:
    """Whether the accuracy is the same from the first evaluation on, while the loss has come down a
    little and stands: the share of the most frequent class."""
    loss, accuracies = signals.loss, signals.accuracies
    if not signals.has_shape or len(accuracies) < 4 or float(np.ptp(accuracies)) > SAME:
        return False
    stands = abs(loss.level(0.4, 0.7) - loss.level(0.8, 1)) < 3 * loss.standard_error(0.2)
    return accuracies[-1] < NOT_GOOD and loss.end > 0.5 * signals.initial and stands


def _is_guess(signals: Signals) -> bool:
    """Whether the number of classes is known, and the loss ends at log(C)."""
    classes = signals.num_classes
    return classes is not None and abs(signals.loss.end / math.log(classes) - 1) < AT_GUESS


def _settles_at_guess(signals: Signals) -> bool:
    """Whether the loss, from wherever it began, has come to log(C) and is there for most of it."""
    if signals.num_classes is None or not signals.has_shape:
        return False
    guess, loss = math.log(signals.num_classes), signals.loss
    levels = (loss.level(0.3, 0.6), loss.end)
    near = all(-AT_GUESS < level / guess - 1 < 2 * AT_GUESS for level in levels)
    return near and loss.lowest > (1 - AT_GUESS) * guess
