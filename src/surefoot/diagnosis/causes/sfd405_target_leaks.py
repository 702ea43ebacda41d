"""SFD405: the target can be read from the input."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals

LITTLE = 0.05
"""Share of the first loss that no honest language model gets below."""
NEW = 0.1
"""The same, on samples that are all new, where the validation loss is not down to half."""


class TargetLeaks(Cause):
    """The target can be read from the input: a language model's loss falls to nearly nothing."""

    info = CauseInfo(
        code="SFD405",
        slug="target-leaks",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="The target can be read from the input: a language model's loss falls to nearly"
        " nothing.",
        observes="The loss of a run that counts tokens, on training and on validation data,"
        " against its start; or on training data alone, where a validation loss that is made"
        " another way (token by token) stays far above it and never turns up, or all samples were"
        " new. Quiet where the validation loss turns up on samples seen before: then the text is"
        " known by heart.",
        why="No text can be foretold so well. Labels that are not shifted, or a mask that is not"
        " causal, let the model copy what it is asked for.",
        fix="Shift the labels by one, exactly once; check that changing a later token leaves"
        " earlier outputs as they were.",
        source="https://github.com/karpathy/nanoGPT/blob/master/model.py (causal mask), audit"
        " rules SF605, SF606, SF610",
        needs=("loss",),
        explains=("validation-differs", "overfitting"),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss = signals.loss
        if not signals.has_shape or not signals.is_language or signals.initial <= 0:
            return None
        validation = signals.validation
        ends = [loss.end] + ([float(validation.values[-1])] if len(validation) else [])
        epochs = signals.recording["epoch"].finite.values
        known_new = len(epochs) > 0 and epochs.max() <= 1
        alone = _trains_alone(signals) or (known_new and _on_new_samples(signals))
        if max(ends) > LITTLE * signals.initial and not alone:
            return None
        if not len(validation) and len(epochs) and epochs.max() > 2:
            return None  # What was seen often may be known by heart.
        below = np.flatnonzero(loss.smooth < LITTLE * signals.initial)
        step = loss.step(int(below[0])) if len(below) else loss.step(-1)
        both = f" and {signals.validation_name}/loss {ends[-1]:.3g}" if len(validation) else ""
        return Verdict(
            f"The loss of a language model fell from {signals.initial:.4g} to {loss.end:.3g}{both};"
            f" it was below {LITTLE:.0%} of its start from step {step} on.",
            weight=0.92,
            evidence={"first_loss": signals.initial, "last_loss": loss.end, "step": step},
        )


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
