"""SFD801: at a resume, the loss jumps."""

from __future__ import annotations

import math

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import spread
from surefoot.diagnosis.signals import Signals


class ResumeJump(Cause):
    """At a resume, the loss jumps."""

    info = CauseInfo(
        code="SFD801",
        slug="resume-jump",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="At a resume, the loss jumps.",
        observes="Loss and rate just before and just after each resume (its event, or a step that"
        " goes back), against the noise. Quiet where they go on.",
        why="What the checkpoint did not hold: moments of the optimizer, position in the data,"
        " state of the schedule, some of the weights.",
        fix="Save and restore optimizer, schedule, scaler, random state and data position with the"
        " weights; `surefoot check --only resume` proves it for a recipe.",
        source="https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html (general"
        " checkpoint)",
        needs=("loss",),
        explains=(
            "bad-batch",
            "rate-too-high",
            "rate-too-high-late",
            "overfitting",
            "exploding-gradients",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss = signals.loss
        if len(loss) < 30:
            return None
        best: Verdict | None = None
        for place in _resumes(signals):
            verdict = _judge(signals, place)
            if verdict is not None and (best is None or verdict.weight > best.weight):
                best = verdict
        return best


def _resumes(signals: Signals) -> list[int]:
    """Positions in the loss of the first row after each resume."""
    steps = signals.loss.series.steps
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    told = [
        int(np.searchsorted(steps, event.step, side="right"))
        for event in signals.recording.events
        if event.kind == "resume"
    ]
    return sorted({int(p) for p in [*back.tolist(), *told] if 10 <= p <= len(steps) - 5})


def _judge(signals: Signals, place: int) -> Verdict | None:
    loss = signals.loss
    before, after = loss.values[max(0, place - 15) : place], loss.values[place : place + 4]
    level, noise = float(np.median(before)), max(spread(before), loss.noise)
    jump = float(np.median(after)) - level
    rows = loss.series.rows
    rates = [signals.at("lr", int(rows[p])) for p in (place - 1, place)]
    known = rates[0] and rates[1] and math.isfinite(rates[0]) and math.isfinite(rates[1])
    factor = rates[1] / rates[0] if known and rates[0] and rates[1] else 1.0
    jumps = jump > max(4 * noise, 0.05 * abs(level))
    odd_rate = not 0.5 < factor < 2.0
    if not jumps and not odd_rate:
        return None
    parts = [f"the loss goes from {level:.4g} to {np.median(after):.4g}"] if jumps else []
    if odd_rate:
        parts.append(f"the rate goes from {rates[0]:.3g} to {rates[1]:.3g}")
    return Verdict(
        f"At the resume at step {loss.step(place)} {' and '.join(parts)} (noise {noise:.2g}).",
        weight=0.93 if jumps else 0.8,
        evidence={
            "step": loss.step(place),
            "loss_before": level,
            "loss_after": float(np.median(after)),
            "rate_factor": factor,
        },
    )
