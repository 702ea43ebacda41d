"""SFD301: gradients overflow in fp16."""

from __future__ import annotations

import math

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.signals import SHORTEST, Signals

HALVINGS = 6
"""Net halvings after the first twentieth of the run that are more than a search for the scale."""
DROPPED = 0.05
"""Share of updates lost to overflow that is more than a scale which adapts costs."""


class HalfPrecisionOverflow(Cause):
    """Gradients overflow in fp16 again and again."""

    info = CauseInfo(
        code="SFD301",
        slug="half-precision-overflow",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="Gradients overflow in fp16 again and again.",
        observes="The loss scale over the run, skipped updates, and gradients that are not finite"
        " while the loss is; under a fixed scale or none, the share of updates that overflow. Quiet"
        " for the halvings at the start and after each doubling, which every fp16 run has.",
        why="fp16 ends at 65,504. A scale that must fall ever further leaves the small gradients"
        " to underflow; without a scale, or with a fixed one, one overflow breaks the run.",
        fix="Use bf16 (precision.dtype=bf16), which has the range of fp32; else a dynamic loss"
        " scale, a mean in place of a sum, clipping after unscaling, and a look at what makes the"
        " gradients so large.",
        source="https://arxiv.org/abs/1710.03740 (mixed precision training: loss scaling)",
        needs=("loss",),
        explains=(
            "exploding-gradients",
            "non-finite-data",
            "non-finite-loss-function",
            "rate-too-high",
            "rate-too-high-at-start",
            "vanishing-gradients",
            "bad-batch",
            "gradients-not-cleared",
            "weights-do-not-move",
            "rate-too-low",
            "labels-unrelated",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        scale = signals.recording["loss_scale"].finite
        if len(scale) >= SHORTEST and not (scale.values == 1.0).all():
            fixed = float(np.ptp(scale.values)) == 0.0
            return _by_fixed_scale(signals) if fixed else _by_scale(signals)
        broke = signals.broke_at
        if not signals.is_half or signals.growth_before_break > 3:
            return None
        if broke is None:
            return _by_fixed_scale(signals)
        loss = signals.at("loss", broke)
        step = signals.step_of_row(broke)
        return Verdict(
            f"Under fp16 without a loss scale that adapts, gradients are no longer finite at step"
            f" {step}"
            f" (loss there {loss if loss is None else format(loss, '.4g')}).",
            weight=0.88,
            evidence={"step": step, "loss": loss, "precision": "fp16"},
            certainty=Certainty.HEURISTIC,
        )


def _by_fixed_scale(signals: Signals) -> Verdict | None:
    """A scale that never moves, or none: each overflow is an update lost, and they go on."""
    overflows = sorted(signals.overflow_rows | signals.broken_rows)
    share = len(overflows) / max(1, signals.recording.num_rows)
    if len(overflows) < 5 or share < DROPPED:
        return None
    scales = signals.recording["loss_scale"].finite.values
    scale = float(scales[0]) if len(scales) else None
    under = "fp16 without a loss scale" if scale is None else f"a fixed loss scale of {scale:.4g}"
    return Verdict(
        f"Under {under}, {len(overflows)} updates ({share:.0%}) have"
        f" gradients that are not finite, the first at step {signals.step_of_row(overflows[0])}.",
        weight=0.95,
        evidence={"scale": scale, "not_finite": len(overflows), "share": share},
    )


def _by_scale(signals: Signals) -> Verdict | None:
    scale = signals.recording["loss_scale"].finite
    late: Floats = scale.values[len(scale) // 20 :]
    highest, lowest = float(late.max()), float(late.min())
    after = late[int(late.argmax()) :]
    halvings = math.log2(highest / max(float(after.min()), 1e-30)) if highest > 0 else 0.0
    times = int((np.diff(late) < 0).sum())
    broken = len(signals.broken_rows | signals.overflow_rows)
    share = broken / max(1, signals.recording.num_rows)
    collapsed = halvings >= HALVINGS or lowest < 1.0
    if not collapsed and not (share > DROPPED and times >= 5):
        return None
    lowest_at = int(scale.values.argmin())
    return Verdict(
        f"The loss scale fell from {highest:.4g} to {lowest:.4g} at step {scale.step(lowest_at)},"
        f" in {times} steps down; {broken} updates had gradients that are not finite.",
        weight=0.95,
        evidence={
            "highest_scale": highest,
            "lowest_scale": lowest,
            "steps_down": times,
            "not_finite": broken,
        },
    )
