"""SFD503: the validation loss does not follow."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import ranks, straightness
from surefoot.diagnosis.signals import Signals

FOLLOWED = 0.3
"""Share of the train loss's way that the validation loss has gone at most."""


RISES = 0.05
"""Share of the first loss by which a validation loss that turns rises again."""
LEARNT = 0.1
"""Share of the first loss by which the mean of the later half is below that of the first tenth: a
run that starts well and stays there gives a validation loss nothing to follow."""


class ValidationDiffers(Cause):
    """The validation loss does not follow the train loss from the first evaluation on."""

    info = CauseInfo(
        code="SFD503",
        slug="validation-differs",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="The validation loss does not follow the train loss from the first evaluation on.",
        observes="How much of the train loss's way the validation loss had gone when the train"
        " loss had gone most of it. Quiet where it follows first and turns later: that is"
        " overfitting.",
        why="Both measure something else: other preprocessing, other labels, another vocabulary,"
        " or BatchNorm statistics that do not fit.",
        fix="Evaluate on a few training samples through the validation path: the loss must be that"
        " of the training; then compare one sample of both, as the model gets it.",
        source="https://arxiv.org/abs/1502.03167 (BatchNorm in evaluation),"
        " https://karpathy.github.io/2019/04/25/recipe/",
        needs=(
            "loss",
            "validation loss",
        ),
        explains=(),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss, validation = signals.loss, signals.validation
        if not signals.has_shape or len(validation) < 3 or signals.relative_drop < 0.2:
            return None
        learnt = float(loss.part(0, 0.1).mean()) - float(loss.part(0.5, 1).mean())
        if signals.is_flat_but_for_noise or learnt < LEARNT * abs(signals.initial):
            return None
        start, steps = signals.initial, validation.series.steps
        way = start - loss.lowest
        train = np.array([signals.train_around(step) for step in steps])
        far = np.flatnonzero(start - train > 0.6 * way)
        if not len(far):
            return None
        at = int(far[0])
        rows = max(5, len(loss) // 20)
        unsure = float(np.hypot(signals.initial_error, loss.error_of_median(rows)))
        if start - float(train[at]) < 3 * unsure:
            return None
        followed = (start - float(validation.values[: at + 1].min())) / max(
            start - float(train[at]), 1e-30
        )
        best = (start - float(validation.values.min())) / way
        # A set that is harder as a whole: its loss falls as the train loss does, from higher up.
        since = max(float(train[0] - train[at]), FOLLOWED * way)
        parallel = float(validation.values[0] - validation.values[: at + 1].min()) / since
        steady = straightness(ranks(validation.values)) < -0.9
        near = float(validation.values[0]) < 1.5 * abs(start)
        if steady and near:
            whole = float(validation.values[0] - validation.values.min()) / way
            parallel = max(parallel, whole)
        steady = steady or near
        if max(followed, parallel if steady else 0.0) > FOLLOWED or best > 2 * FOLLOWED:
            return None
        return Verdict(
            f"At step {steps[at]:.0f} the train loss had come from {start:.4g} to {train[at]:.4g},"
            f" {signals.validation_name}/loss is {validation.values[at]:.4g}; its best of all is"
            f" {validation.values.min():.4g}.",
            # Who has seen the samples often may know them by heart: then it can be overfitting.
            weight=0.55 if _by_heart(signals) else 0.9,
            evidence={
                "step": int(steps[at]),
                "train_loss": float(train[at]),
                "validation_loss": float(validation.values[at]),
                "best_validation_loss": float(validation.values.min()),
                "share_followed": followed,
            },
        )


def _by_heart(signals: Signals) -> bool:
    """Whether it may be overfitting: the validation loss had followed at first, and rises."""
    values = signals.validation.values
    rises = float(np.median(values[-3:])) - float(values.min()) > RISES * abs(signals.initial)
    return signals.follows_first and rises
