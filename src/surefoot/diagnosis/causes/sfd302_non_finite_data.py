"""SFD302: NaN or infinity in the data."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import Curve
from surefoot.diagnosis.signals import Signals


class NonFiniteData(Cause):
    """The loss is NaN at once, out of an ordinary stretch."""

    info = CauseInfo(
        code="SFD302",
        slug="non-finite-data",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="Some batch holds NaN or infinity.",
        observes="The loss and gradient norm before the first NaN: in order to the very end. With"
        " sample ids, the sample that all broken windows share.",
        why="One NaN in an input makes the loss NaN, whatever the rate, and one update with it"
        " makes every weight NaN.",
        fix="Look at the samples of that window (sample_ids of its row) and clean them;"
        " guard.non_finite=skip leaves such updates out until then.",
        source="https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
        needs=("loss",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss = signals.recording["loss"]
        position = loss.first_non_finite()
        if position is None or position < 3 or not np.isnan(loss.values[position]):
            return None
        before = Curve(loss.where(np.arange(len(loss)) < position))
        if before.values[-1] > before.smooth[-1] + 6 * before.noise:
            return None
        return Verdict(
            f"The loss is NaN at step {loss.step(position)}; just before it was"
            f" {before.values[-1]:.4g}, in its ordinary range.",
            weight=0.7,
            evidence={"step": loss.step(position), "loss_before": float(before.values[-1])},
        )
