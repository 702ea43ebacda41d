"""SFD601: the loss does not fit the outputs."""

from __future__ import annotations

import math

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals

START = 0.03
"""Share by which the first rows differ where the loss has not left its start."""
PRESSED = 0.01
"""Share of the floor by which a loss that has come to it is off, and its batches differ."""
CLOSE = 0.1
"""Share of the way that is left to the floor at most, where no accuracy tells."""
ALIKE = 0.02
"""Share of the floor by which batches differ at most there."""
MANY = 10
"""Classes above which any first loss is near the logarithm of some number of them."""


class WrongLoss(Cause):
    """The loss does not fit the model's outputs."""

    info = CauseInfo(
        code="SFD601",
        slug="wrong-loss",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="The loss does not fit the model's outputs.",
        observes="A loss that falls below zero and goes on, or lies between -1 and 0; or one that"
        " stalls above the floor that cross-entropy has after a softmax, log(e + C - 1) - 1 for C"
        " classes, though the accuracy is good. Quiet for losses that may be negative and settle.",
        why="nll_loss on scores rewards ever larger scores; softmax before cross_entropy, which"
        " has one inside, makes the best possible loss 1.46 for ten classes and flattens every"
        " gradient.",
        fix="Give cross_entropy the scores as they are (no softmax, no log_softmax before it);"
        " nll_loss wants log_softmax.",
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html,"
        " audit rules SF601, SF603",
        needs=("loss",),
        explains=(
            "rate-too-low",
            "underfitting",
            "labels-unrelated",
            "vanishing-gradients",
            "exploding-gradients",
            "rate-too-high-late",
            "validation-differs",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        if not signals.has_shape or signals.broke_at is not None:
            return None
        return _below_zero(signals) or _after_softmax(signals)


def _below_zero(signals: Signals) -> Verdict | None:
    loss = signals.loss
    if loss.end >= 0:
        return None
    evidence = {"first_loss": signals.initial, "last_loss": loss.end}
    parts = signals.progress_per_rate(5)
    if loss.end < -1 and parts[-1] > 0.7 * float(parts.max()) > 0:
        return Verdict(
            f"The loss goes below zero and on, from {signals.initial:.4g} to {loss.end:.4g}; for"
            f" the rate that there was, the last fifth of it brought {parts[-1]:.3g}, the best one"
            f" {parts.max():.3g}: nothing stops it.",
            weight=0.95,
            evidence=evidence,
        )
    if float(loss.values.min()) >= -1 and float(loss.values.max()) <= 0:
        return Verdict(
            f"The loss lies between -1 and 0, from {signals.initial:.4g} to {loss.end:.4g}, as"
            " minus a probability does: the logarithm is missing.",
            weight=0.9,
            evidence=evidence,
        )
    return None


def _after_softmax(signals: Signals) -> Verdict | None:
    loss = signals.loss
    if not signals.begins_at_start or signals.initial <= 0:
        return None
    # The very first rows: at a good rate a loss has left its start after a few.
    initial = float(np.median(loss.values[:5]))
    seen = float(np.ptp(loss.values[:3])) < START * initial
    if signals.num_classes is None and loss.series.steps[0] > 1 and not seen:
        return None
    classes = signals.num_classes or round(math.exp(min(max(initial, 0.0), 20.0)))
    if classes < 2 or (signals.accuracy is None and signals.num_classes is None and classes > MANY):
        return None
    floor = math.log(math.e + classes - 1) - 1
    at_floor = abs(loss.end - floor) < PRESSED * floor and loss.noise < PRESSED * floor
    known = signals.num_classes is not None and (signals.accuracy is not None or at_floor)
    if abs(math.log(classes) - initial) > 0.02 * initial and not known:
        return None
    lowest = min(float(loss.smooth.min()), *signals.validation.values.tolist(), math.inf)
    if lowest < floor - 0.01:
        return None
    rate = signals.rate
    kept = not len(rate) or float(np.median(rate.part(0.4, 0.6))) > 0.2 * float(rate.values.max())
    stalls = kept and loss.level(0.5, 0.7) - loss.end < 0.15 * (signals.initial - loss.end)
    accuracy = signals.accuracy
    evidence = {
        "classes": classes,
        "floor": floor,
        "first_loss": signals.initial,
        "last_loss": loss.end,
        "accuracy": accuracy,
    }
    if accuracy is not None:
        # After a softmax the loss is about log(e + C - 1) minus the probability of the label, which
        # is the accuracy, or less where the model is not sure.
        expected = math.log(math.e + classes - 1) - accuracy
        last = float(signals.validation.values[-1])
        # What an honest model of this accuracy has at most, its errors spread over the others.
        wrong = max(1 - accuracy, 1e-9)
        honest = -accuracy * math.log(max(accuracy, 1e-9)) - wrong * math.log(wrong / (classes - 1))
        if last < 1.2 * honest or not -0.1 < last - expected < 0.25 or not stalls:
            return None
        return Verdict(
            f"With an accuracy of {accuracy:.0%} the loss is still {last:.4g}, of"
            f" {signals.initial:.4g} at first: softmax stands before cross-entropy, whose floor is"
            f" then {floor:.4g} for {classes} classes.",
            weight=0.92,
            evidence=evidence,
        )
    first, second = signals.progress_per_rate(2)
    if second > 0.25 * (first + second):
        return None
    near = (loss.end - floor) / max(signals.initial - floor, 1e-30)
    came_down = at_floor or signals.relative_drop > 0.1
    # Where every answer is as sure as it can be, batches hardly differ; at the noise of a task
    # that happens to lie there they do.
    alike = loss.noise < ALIKE * floor
    if not stalls or near > CLOSE or not alike or not came_down:
        return None
    return Verdict(
        f"The loss stalls at {loss.end:.4g}, just above {floor:.4g}, the floor of cross-entropy"
        f" after a softmax over {classes} classes.",
        weight=0.75,
        evidence=evidence,
        certainty=Certainty.HEURISTIC,
    )
