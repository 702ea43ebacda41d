"""SFD105: the schedule was at its end long before the run."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals

STANDING = 0.002
"""Share of the peak below which no weight moves any more. Step decay ends above it."""


class ScheduleEndsEarly(Cause):
    """The schedule was at its end long before the run was."""

    info = CauseInfo(
        code="SFD105",
        slug="schedule-ends-early",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="The schedule was at its end long before the run was.",
        observes="When the rate fell to a fiftieth of its peak for good, how much of the run was"
        " left, and what the loss did there. Quiet where less than a fifth was left; for a low"
        " last stage of step decay, unless the loss was still falling before and no longer"
        " does, and the rate came down at once.",
        why="At a rate of nearly zero the weights stand still: these updates cost time and teach"
        " nothing. Mostly the horizon of the schedule was given in another unit, or for another"
        " batch size or number of ranks.",
        fix="Give the schedule the length of the run (it takes the horizon itself in a recipe);"
        " keep a floor of a tenth of the peak.",
        source="https://arxiv.org/abs/2203.15556 (the length of the cosine must be that of the"
        " run)",
        needs=("lr",),
        explains=(
            "underfitting",
            "rate-too-low",
            "rate-too-high-late",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        rate = signals.rate
        if len(rate) < 10 or signals.broke_at is not None:
            return None
        peak = float(rate.values.max())
        above = np.flatnonzero(rate.values > 0.02 * peak)
        if not len(above) or peak <= 0:
            return None
        end = int(above[-1]) + 1
        left = 1 - end / len(rate)
        if left < 0.2:
            return None
        step = rate.step(min(end, len(rate) - 1))
        is_stage = float(np.median(rate.values[end:])) > STANDING * peak
        before = rate.values[max(0, end - max(3, len(rate) // 20)) : end]
        # A rate that had been held below its peak before it fell goes down in steps.
        in_steps = bool(np.ptp(before) < 1e-6 * peak and before[-1] < 0.5 * peak)
        if is_stage and (in_steps or not _cuts_off(signals, step)):
            return None
        gained = signals.train_around(step) - signals.loss.end if len(signals.loss) else None
        total = signals.loss.drop if len(signals.loss) else 0.0
        text = (
            ""
            if gained is None
            else f" The loss fell by {gained:.3g} since, of {total:.3g} in all."
        )
        return Verdict(
            f"From step {step} on the rate is below a fiftieth of its peak ({peak:.3g}); that is"
            f" {left:.0%} of the run.{text}",
            weight=0.9,
            evidence={"step": step, "peak_rate": peak, "share_left": left, "gained_since": gained},
        )


def _cuts_off(signals: Signals, step: float) -> bool:
    """Whether the loss was clearly falling up to a step, and is flat from there on."""
    loss = signals.loss
    place = int(np.searchsorted(loss.series.steps, step))
    width = len(loss) // 10
    if len(loss) < 40 or place < 2 * width or place > len(loss) - 2 * width:
        return False
    parts = (loss.values[place + first * width :][:width] for first in (-2, -1, 0))
    early, late, after = (float(np.median(part)) for part in parts)
    sure = 4 * loss.standard_error()
    fell = early - late
    return fell > max(0.03 * abs(loss.drop), sure) and after - loss.end < 0.25 * fell
