"""SFD205: one tower's gradients shoot up."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import median_before
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.signals import Signals

SPIKE = 6.0
"""Times the usual norm of the same tower."""
OFTENER = 3
"""Times as many spikes as any other tower."""
ALONE = 3.0
"""Times its usual share of the other towers' norms: a hard batch raises them all."""


class OneTowerSpikes(Cause):
    """One tower's gradients shoot up while the others are steady."""

    info = CauseInfo(
        code="SFD205",
        slug="one-tower-spikes",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="One tower's gradients shoot up while the others are steady.",
        observes="The gradient norm of each tower (`grad_norm/NAME`) against its own past, and"
        " against those of the others in the same row. Quiet for batches that raise them all.",
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
        towers = list(signals.recording.family("grad_norm"))
        steps, *columns = signals.recording.aligned(*(f"grad_norm/{name}" for name in towers))
        table = np.array(columns)
        sound = np.isfinite(table).all(axis=0)
        steps, table = steps[sound], table[:, sound]
        if len(steps) <= 10:
            return None
        counts = [_spikes_alone(table, tower) for tower in range(len(towers))]
        tower = max(range(len(towers)), key=lambda one: len(counts[one]))
        name, found = towers[tower], counts[tower]
        others = max(len(rows) for one, rows in enumerate(counts) if one != tower)
        if len(found) < 3 or len(found) < OFTENER * others:
            return None
        norms = table[tower]
        usual = float(np.median(norms))
        worst = max(found, key=lambda position: float(norms[position]))
        return Verdict(
            f"The gradient norm of {name!r} is above {SPIKE:g} times its usual ({usual:.3g}) in"
            f" {len(found)} rows, first at step {steps[found[0]]:.0f}, worst"
            f" {norms[worst]:.3g} at step {steps[worst]:.0f}; the other towers have"
            f" {others} such rows.",
            weight=0.95,
            evidence={
                "tower": name,
                "spikes": len(found),
                "spikes_of_others": others,
                "median_grad_norm": usual,
                "worst_grad_norm": float(norms[worst]),
                "worst_step": int(steps[worst]),
            },
        )


def _spikes_alone(table: Floats, tower: int) -> list[int]:
    """Rows in which a tower is far above its own past, and far above the others for once."""
    norms = table[tower]
    share = norms / np.maximum(np.median(np.delete(table, tower, axis=0), axis=0), 1e-30)
    with np.errstate(invalid="ignore"):
        found = norms > SPIKE * median_before(norms)
        found &= share > ALONE * median_before(share)
    found[:5] = False
    return [int(position) for position in np.flatnonzero(found)]
