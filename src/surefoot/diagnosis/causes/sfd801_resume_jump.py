"""SFD801: at a resume, the loss jumps."""

from __future__ import annotations

import math
import re

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import spread
from surefoot.diagnosis.signals import Signals

NEAR = 5
"""Rows just before a resume whose level is compared."""
WIDTHS = (4, 10, 25)
"""Rows before and after over which a jump is sought: the longer, the smaller it may be."""
SURE = 4.0
"""Standard errors of the difference of two medians by which it is none of chance."""
FASTER = 2.0
"""Times the most that the weights' norm had changed by from row to row before."""
RESUMED = re.compile(r"\bresum(e|es|ed|ing)\b", re.IGNORECASE)
"""What an event that is a resume says of itself, or is called."""
LEARNT = 0.5
"""Share of what had been gained that is kept at least, where only the count began anew."""
ODD = 1.25
"""Factor of the rate from one row to the next that no smooth schedule makes."""


class ResumeJump(Cause):
    """At a resume, the loss jumps."""

    info = CauseInfo(
        code="SFD801",
        slug="resume-jump",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="At a resume, the loss jumps.",
        observes="Loss, rate, and how fast the weights' norm changes just before and just after"
        " each resume (its event, or a step that goes back), against the noise; and whether the"
        " count of updates begins anew. Quiet where they go on.",
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
    back = (np.flatnonzero(np.diff(steps) < 0) + 1).tolist()
    told = []
    for event in signals.recording.events:
        if RESUMED.search(event.kind) or RESUMED.search(event.message):
            near = [p for p in back if steps[p] in (event.step, event.step + 1)]
            # Logs count updates from 0 or from 1: the row of the event's step is the first one
            # after the resume, or the last one before.
            sides = [int(np.searchsorted(steps, event.step, side=s)) for s in ("left", "right")]
            told += near or sides
    return sorted({int(p) for p in [*back, *told] if 10 <= p <= len(steps) - 5})


def _judge(signals: Signals, place: int) -> Verdict | None:
    loss = signals.loss
    before = loss.values[max(0, place - 15) : place]
    line = np.polynomial.Polynomial.fit(np.arange(-len(before), 0), before, 1)
    noise = max(spread(before - line(np.arange(-len(before), 0))), loss.noise)
    level = float(np.median(before[-NEAR:]))
    # A jump that lasts is seen by more rows where single ones are noisy.
    jumps = False
    for width in WIDTHS:
        before, after = loss.values[max(0, place - max(NEAR, width)) : place], loss.values[place:]
        after = after[:width]
        unsure = 1.25 * noise * (1 / len(before) + 1 / len(after)) ** 0.5
        jump = float(np.median(after)) - float(np.median(before))
        jumps = len(after) == width and jump > max(SURE * unsure, 0.05 * abs(level))
        if jumps:
            break
    rates, factor, odd_rate = _rate_step(signals, place)
    pace = _pace(signals, place)
    anew = _counts_anew(signals, place)
    if not jumps and not odd_rate and pace < FASTER and not anew:
        return None
    parts = [f"the loss goes from {level:.4g} to {np.median(after):.4g}"] if jumps else []
    if odd_rate:
        parts.append(f"the rate goes from {rates[0]:.3g} to {rates[1]:.3g}")
    if anew:
        parts.append(f"the count of updates begins anew after {loss.step(place - 1)}")
    if pace >= FASTER:
        parts.append(f"the norm of the weights changes {pace:.3g} times as fast")
    return Verdict(
        f"At the resume at step {loss.step(place)} {' and '.join(parts)} (noise {noise:.2g}).",
        weight=0.93 if jumps else 0.8,
        evidence={
            "step": loss.step(place),
            "loss_before": level,
            "loss_after": float(np.median(after)),
            "rate_factor": factor,
            "pace_of_weights": pace,
        },
    )


def _counts_anew(signals: Signals, place: int) -> bool:
    """Whether the step falls back to where the log began, though the weights are what they were."""
    loss = signals.loss
    steps = loss.series.steps
    if steps[place] > steps[: max(2, place // 20)].max():
        return False
    before = float(np.median(loss.values[max(0, place - WIDTHS[1]) : place]))
    after = float(np.median(loss.values[place : place + WIDTHS[0]]))
    return before < signals.initial and after < before + (1 - LEARNT) * (signals.initial - before)


def _pace(signals: Signals, place: int) -> float:
    """How much faster the norm of the weights changes just after a row than before it, at most; or
    how far it is at once from what it was at that step."""
    norms = signals.recording["weight_norm"].finite
    row = int(signals.loss.series.rows[place])
    at = int(np.searchsorted(norms.rows, row))
    before = np.abs(np.diff(norms.values[max(0, at - 15) : at]))
    after = np.abs(np.diff(norms.values[at : at + 10]))
    if len(before) < 8 or len(after) < 6 or before.max() <= 0:
        return 1.0
    same = np.flatnonzero(norms.steps[:at] <= norms.steps[at])
    off = abs(norms.values[at] - norms.values[same[-1]]) / 2 if len(same) else 0.0
    return float(max(np.median(after), off) / before.max())


def _rate_step(signals: Signals, place: int) -> tuple[tuple[float, float], float, bool]:
    """Rates before and after, their factor, and whether it is far above the pace that the schedule
    had until then."""
    rows = signals.loss.series.rows[max(0, place - 6) : place + 1]
    rates = np.array([signals.at("lr", int(row)) or np.nan for row in rows])
    if not (np.isfinite(rates).all() and (rates > 0).all()):
        return (math.nan, math.nan), 1.0, False
    paces = np.abs(np.diff(np.log(rates)))
    odd = float(paces[-1]) > max(math.log(ODD), 3 * float(paces[:-1].max()))
    return (float(rates[-2]), float(rates[-1])), float(rates[-1] / rates[-2]), odd
