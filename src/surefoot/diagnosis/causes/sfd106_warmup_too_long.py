"""SFD106: the rate is still climbing when the run ends."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals


class WarmupTooLong(Cause):
    """The rate is still climbing when the run ends."""

    info = CauseInfo(
        code="SFD106",
        slug="warmup-too-long",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="The rate is still climbing when the run ends.",
        observes="Whether the highest rate is the last one, and the rate has risen all the way"
        " there.",
        why="The run never trained at the rate that it was meant to. Mostly the warm-up was given"
        " in samples or tokens and read as updates, or for a longer run.",
        fix="Give the warm-up 1 to 5 % of the updates; `surefoot show schedule` draws it before"
        " the run.",
        source="https://arxiv.org/abs/1706.02677 (gradual warm-up)",
        needs=("lr",),
        explains=(
            "rate-too-low",
            "underfitting",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        rate = signals.rate
        if len(rate) < 10 or signals.broke_at is not None:
            return None
        values = rate.values
        peak = float(values.max())
        late = values[int(0.7 * len(values)) :]
        rises = bool((np.diff(values) >= -1e-9 * peak).all())
        if not rises or values[-1] < peak or late[0] > 0.93 * peak:
            return None
        return Verdict(
            f"The rate rises from {values[0]:.3g} to {peak:.3g} at step {rate.step(-1)}, where the"
            f" run"
            " ends; it was never held or lowered.",
            weight=0.92,
            evidence={"first_rate": float(values[0]), "last_rate": peak, "step": rate.step(-1)},
        )
