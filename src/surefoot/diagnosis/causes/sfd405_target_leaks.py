"""SFD405: the target can be read from the input."""

from __future__ import annotations

import math

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals

LITTLE = 0.05
"""Share of the first loss that no honest language model gets below."""
MANY = 16
"""Classes from which on nobody comes that low on samples seen once, such as characters."""
SYMBOLS = 40
"""Size of a vocabulary below which it is none of a language."""
MOST = 1_000_000
"""Classes above which a first loss is none of a guess."""
NOTHING = 0.01
"""Share of the first loss that nobody gets below who has seen half of the samples once."""
AT_ONCE = 0.15
"""Share of the run in which it does."""
GUESS = 0.9
"""Share of the first loss that a validation loss stays above which learnt nothing."""
NEW = 0.1
"""The same, on samples that are all new, where the validation loss is not down to half."""


class TargetLeaks(Cause):
    """The target can be read from the input: the loss falls to nearly nothing at once."""

    info = CauseInfo(
        code="SFD405",
        slug="target-leaks",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="The target can be read from the input: the loss falls to nearly nothing at once.",
        observes="The loss of a run that counts tokens, or guesses among many classes, on training"
        " and on validation data, against its start; or on training data alone, where a validation"
        " loss that is made another way (token by token) stays far above it and never turns up, or"
        " all samples were new. Of any run, a loss that is at nearly nothing in the first part of"
        " the first epoch, while the validation loss never gets below that of a guess. Quiet where"
        " the validation loss turns up on samples seen before: then they are known by heart.",
        why="No text can be foretold so well, and no task is learnt from so few samples. Labels"
        " that are not shifted, a mask that is not causal, or a column that is made from the"
        " target let the model copy what it is asked for.",
        fix="Shift the labels by one, exactly once; check that changing a later token leaves"
        " earlier outputs as they were. Look for an input that tells the target: train on one"
        " column, or one part of the picture, at a time.",
        source="https://github.com/karpathy/nanoGPT/blob/master/model.py (causal mask), audit"
        " rules SF605, SF606, SF610",
        needs=("loss",),
        explains=("validation-differs", "overfitting"),
    )

    def look(self, signals: Signals) -> Verdict | None:
        if not signals.has_shape or signals.initial <= 0:
            return None
        if _is_copied(signals):
            return _verdict(signals, LITTLE, 0.92)
        if _is_there_at_once(signals):
            return _verdict(signals, NOTHING, 0.9)
        return None


def _verdict(signals: Signals, share: float, weight: float) -> Verdict:
    loss, validation = signals.loss, signals.validation
    below = np.flatnonzero(loss.smooth < share * signals.initial)
    step = loss.step(int(below[0])) if len(below) else loss.step(-1)
    last = ""
    if len(validation):
        last = f" ({signals.validation_name}/loss {validation.values[-1]:.3g})"
    return Verdict(
        f"The loss fell from {signals.initial:.4g} to {loss.end:.3g}"
        f"{last}; it was below {share:.0%} of its start from step"
        f" {step} on.",
        weight=weight,
        evidence={"first_loss": signals.initial, "last_loss": loss.end, "step": step},
    )


def _is_copied(signals: Signals) -> bool:
    """Whether a loss over a vocabulary is at nearly nothing, and not known by heart."""
    if signals.initial > math.log(MOST):
        return False  # No guess: weights out of scale, of whose first loss anything is little.
    if not signals.is_language and signals.initial < math.log(MANY):
        return False
    validation = signals.validation
    last = max([signals.loss.end, *validation.values[-1:].tolist()])
    epochs = signals.recording["epoch"].finite.values
    known_new = len(epochs) > 0 and epochs.max() <= 1
    if _trains_alone(signals) or (known_new and _on_new_samples(signals)):
        return True
    if signals.num_classes is not None and signals.num_classes < SYMBOLS:
        return False  # Sorting, copying, counting: tasks without noise, which can be learnt.
    if not signals.is_language:
        return known_new and len(validation) > 0 and last < LITTLE * signals.initial
    # What was seen often may be known by heart, and nothing says that it is not.
    often = len(epochs) > 0 and epochs.max() > 2 and not len(validation)
    return last <= LITTLE * signals.initial and not often


def _is_there_at_once(signals: Signals) -> bool:
    """Whether the train loss is at nothing before half of the samples were seen once, while the
    validation loss stays at that of a guess or worse. Where that falls, too, the task may be one
    that has no noise, such as copying."""
    loss, validation, epochs = signals.loss, signals.validation, signals.recording["epoch"].finite
    below = np.flatnonzero(loss.smooth < NOTHING * signals.initial)
    if len(validation) < 2 or not len(below) or below[0] > AT_ONCE * len(loss):
        return False
    if not len(epochs) or np.interp(loss.step(int(below[0])), epochs.steps, epochs.values) > 0.5:
        return False
    return float(validation.values.min()) > GUESS * signals.initial


def _on_new_samples(signals: Signals) -> bool:
    """Whether the train loss is at nearly nothing, and the validation loss is high: of samples that
    the run had never seen before, none is known by heart."""
    values = signals.validation.values
    high = len(values) > 1 and float(np.median(values[-2:])) > signals.initial / 2
    return high and signals.loss.end < NEW * signals.initial


def _trains_alone(signals: Signals) -> bool:
    """Whether the train loss is at nearly nothing for a quarter of the run, and the validation
    loss, far above it, goes on falling: what is learnt by heart makes it rise."""
    loss, values = signals.loss, signals.validation.values
    if len(values) < 4 or loss.level(0.75, 0.85) > LITTLE * signals.initial:
        return False
    late = float(np.median(values[-2:]))
    never_turned = late < 1.05 * float(values.min()) and late < float(
        np.median(values[: len(values) // 2 + 1])
    )
    return never_turned and late > 5 * loss.end
