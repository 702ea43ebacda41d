"""SFD204: zero_grad is missing."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import ranks, straightness
from surefoot.diagnosis.signals import Signals

STEADY = 0.95
"""Rank correlation with the time of a norm that grows all along."""
GROWTH = 5.0
"""Factor by which the norm grows from the first update on, at least."""


class GradientsNotCleared(Cause):
    """Each gradient holds all the ones before it: zero_grad is missing."""

    info = CauseInfo(
        code="SFD204",
        slug="gradients-not-cleared",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="Each gradient holds all the ones before it: zero_grad is missing.",
        observes="Whether the gradient norm grows from the first update on and changes little from"
        " row to row. Quiet where rows differ as batches do.",
        why="backward() adds to what is there. The sum of all past gradients points to where the"
        " model has been, ever longer.",
        fix="Call optimizer.zero_grad(set_to_none=True) once for each update, before the first"
        " backward of the window.",
        source="https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html",
        needs=("grad_norm",),
        explains=(
            "exploding-gradients",
            "rate-too-high",
            "rate-too-high-late",
            "rate-too-high-at-start",
            "underfitting",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        gradient = signals.gradient
        if len(gradient) < 20:
            return None
        values = gradient.values
        first = float(values[0])
        if first <= 0:
            return None
        change = np.abs(np.diff(values)) / np.maximum(values[:-1], 1e-30)
        jump = float(np.median(change[3:]))
        growth = float(gradient.smooth.max()) / first
        early = float(values[min(4, len(values) - 1)]) / first
        sums = values[1:5] / (first * np.arange(2, 6))
        steps = gradient.series.steps[:5]
        each = steps[0] <= 1 and bool((np.diff(steps) == 1).all())
        adds_up = each and bool((np.abs(sums - 1) < 0.25).all())
        # Where the log begins later, its first norm is a sum already.
        least = GROWTH if steps[0] <= 1 else GROWTH / 2
        rises = early > 1.8 or (growth > 2 * GROWTH and straightness(ranks(values)) > STEADY)
        if growth < least or not rises or not (adds_up or jump < 0.08):
            return None
        return Verdict(
            f"The gradient norm grows from {first:.3g} at step {gradient.step(0)} over"
            f" {values[4]:.3g} at step {gradient.step(4)} to {gradient.smooth.max():.3g}, and from"
            f" one"
            f" row to the next it changes by {jump:.1%} only: a sum of gradients, not one batch's.",
            weight=0.93,
            evidence={
                "first_grad_norm": first,
                "fifth_grad_norm": float(values[4]),
                "highest_grad_norm": float(gradient.smooth.max()),
                "median_change": jump,
            },
        )
