"""SFD105: the schedule was at its end long before the run."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals


class ScheduleEndsEarly(Cause):
    """The schedule was at its end long before the run was."""

    info = CauseInfo(
        code="SFD105",
        slug="schedule-ends-early",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="The schedule was at its end long before the run was.",
        observes="When the rate fell to a fiftieth of its peak for good, how much of the run was"
        " left, and what the loss did there. Quiet where less than a fifth was left.",
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
