"""SFD601: the loss does not fit the outputs."""

from __future__ import annotations

import math

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals


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
    first, second = _progress_per_rate(signals)
    if loss.end < -1 and second > 0.5 * first > 0:
        return Verdict(
            f"The loss goes below zero and on, from {signals.initial:.4g} to {loss.end:.4g}; for"
            f" the rate that there was, it fell by {first:.3g} and then by {second:.3g} in equal"
            " parts of the run: nothing stops it.",
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


def _progress_per_rate(signals: Signals) -> tuple[float, float]:
    """How far the loss fell over two parts of the run in which the rates sum up to the same.

    The first twentieth is left out: some of it is the end of random weights.
    """
    loss, rate = signals.loss, signals.rate
    begin = len(loss) // 20
    middle = (begin + len(loss)) // 2
    if len(rate) == len(loss):
        total = np.cumsum(rate.values)
        middle = int(np.searchsorted(total, (total[begin] + total[-1]) / 2))
    at = [float(loss.smooth[min(place, len(loss) - 1)]) for place in (begin, middle, len(loss) - 1)]
    return at[0] - at[1], at[1] - at[2]


def _after_softmax(signals: Signals) -> Verdict | None:
    loss = signals.loss
    if not signals.begins_at_start or signals.initial <= 0:
        return None
    known = signals.recording.facts.get("num_classes")
    classes = known if isinstance(known, int) else round(math.exp(min(signals.initial, 20.0)))
    if classes < 2 or abs(math.log(classes) - signals.initial) > 0.02 * signals.initial:
        return None
    floor = math.log(math.e + classes - 1) - 1
    if float(loss.smooth.min()) < floor - 0.01:
        return None
    rate = signals.rate
    kept = not len(rate) or float(np.median(rate.part(0.4, 0.6))) > 0.2 * float(rate.values.max())
    stalls = kept and loss.level(0.5, 0.7) - loss.end < 0.15 * (signals.initial - loss.end)
    accuracy = _accuracy(signals)
    evidence = {
        "classes": classes,
        "floor": floor,
        "first_loss": signals.initial,
        "last_loss": loss.end,
        "accuracy": accuracy,
    }
    if accuracy is not None:
        # After a softmax the loss is about log(e + C - 1) minus the probability of the label.
        expected = math.log(math.e + classes - 1) - accuracy
        last = float(signals.validation.values[-1])
        # What an honest model of this accuracy has at most, its errors spread over the others.
        wrong = max(1 - accuracy, 1e-9)
        honest = -accuracy * math.log(max(accuracy, 1e-9)) - wrong * math.log(wrong / (classes - 1))
        if last < 1.2 * honest or abs(last - expected) > 0.1 or not stalls:
            return None
        return Verdict(
            f"With an accuracy of {accuracy:.0%} the loss is still {last:.4g}, of"
            f" {signals.initial:.4g} at first: softmax stands before cross-entropy, whose floor is"
            f" then {floor:.4g} for {classes} classes.",
            weight=0.92,
            evidence=evidence,
        )
    near = (loss.end - floor) / max(signals.initial - floor, 1e-30)
    if not stalls or near > 0.22 or signals.relative_drop < 0.1:
        return None
    return Verdict(
        f"The loss stalls at {loss.end:.4g}, just above {floor:.4g}, the floor of cross-entropy"
        f" after a softmax over {classes} classes.",
        weight=0.75,
        evidence=evidence,
        certainty=Certainty.HEURISTIC,
    )


def _accuracy(signals: Signals) -> float | None:
    """The last accuracy of the validation set, from 0 to 1."""
    for name, series in signals.recording.evaluations.items():
        if name.startswith(f"{signals.validation_name}/") and "acc" in name and len(series.finite):
            value = float(series.finite.values[-1])
            return value / 100 if value > 1 else value
    return None
