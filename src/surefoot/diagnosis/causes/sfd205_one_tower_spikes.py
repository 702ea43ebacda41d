"""SFD205: one tower's gradients shoot up."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals, spikes

SPIKE = 6.0
"""Times the usual norm of the same tower."""


class OneTowerSpikes(Cause):
    """One tower's gradients shoot up while the others are steady."""

    info = CauseInfo(
        code="SFD205",
        slug="one-tower-spikes",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="One tower's gradients shoot up while the others are steady.",
        observes="The gradient norm of each tower (`grad_norm/NAME`) against its own past.",
        why="Where modalities are not aligned yet, the small or the new tower gets gradients far"
        " out of its range from single batches; the common norm hides which one it is.",
        fix="Freeze the tower, or give it a lower rate (optimizer.groups), until the projector is"
        " aligned; clip each tower by itself; look at the batches of those steps.",
        source="https://arxiv.org/abs/2304.08485 (LLaVA: align the projector first, towers frozen)",
        needs=("grad_norm/NAME",),
        explains=(
            "exploding-gradients",
            "bad-batch",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        towers = signals.recording.family("grad_norm")
        counts = {
            name: spikes(series, SPIKE) for name, series in towers.items() if len(series) > 10
        }
        if len(counts) < 2:
            return None
        name = max(counts, key=lambda key: len(counts[key]))
        others = max(len(found) for key, found in counts.items() if key != name)
        found = counts[name]
        if len(found) < 2 or len(found) < 4 * others:
            return None
        series = towers[name].finite
        usual = float(np.median(series.values))
        worst = max(found, key=lambda position: series.values[position])
        return Verdict(
            f"The gradient norm of {name!r} is above {SPIKE:g} times its usual ({usual:.3g}) in"
            f" {len(found)} rows, first at step {series.step(found[0])}, worst"
            f" {series.values[worst]:.3g} at step {series.step(worst)}; the other towers have"
            f" {others} such rows.",
            weight=0.95,
            evidence={
                "tower": name,
                "spikes": len(found),
                "spikes_of_others": others,
                "median_grad_norm": usual,
                "worst_grad_norm": float(series.values[worst]),
                "worst_step": series.step(worst),
            },
        )
