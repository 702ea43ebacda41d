"""SFD401: single batches stand far above the rest."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import spread
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.signals import Signals

SIGMAS = 8.0
TAIL = 10.0
"""Steps of its own decay by which a spike stands beyond the tail of the run's other batches."""
DESCENT = 0.3
"""Height of a spike, as a share of all that the loss came down."""


class BadBatch(Cause):
    """Single batches stand far above the rest."""

    info = CauseInfo(
        code="SFD401",
        slug="bad-batch",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="Single batches stand far above the rest.",
        observes="Rows whose loss stands far above the rows before, and far on the scale of all"
        " that the run has learnt, and come back at once. Quiet where there are many of them, where"
        " the loss does not come back, and for what the tail of small noisy batches reaches.",
        why="Broken labels or outliers in one batch: its gradient points elsewhere, and Adam's"
        " statistics keep it for a thousand updates.",
        fix="Look at the samples of those steps (`sample_ids`); clean them or clip the gradient;"
        " guard against spikes by skipping such updates.",
        source="https://arxiv.org/abs/2204.02311 (PaLM, 5.1: spikes, and skipping the batches"
        " around them)",
        needs=("loss",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss = signals.loss
        if len(loss) < 30:
            return None
        found = _single(signals)
        if not found or len(found) > max(4, 0.02 * len(loss)):
            return None
        worst = max(found, key=lambda position: loss.values[position] - loss.smooth[position])
        usual = float(loss.smooth[worst])
        ids = [signals.recording.sample_ids.get(int(loss.series.rows[p]), ()) for p in found]
        return Verdict(
            f"{'One batch stands' if len(found) == 1 else f'{len(found)} batches stand'} far above"
            f" the"
            f" rest: at step {loss.step(worst)} the loss is {loss.values[worst]:.4g}, around it"
            f" {usual:.4g} (noise {loss.noise:.2g}); afterwards the run goes on as before.",
            weight=0.82,
            evidence={
                "steps": [loss.step(position) for position in found],
                "losses": [float(loss.values[position]) for position in found],
                "usual": usual,
                "noise": loss.noise,
                "samples": [list(samples[:16]) for samples in ids],
            },
        )


def _single(signals: Signals) -> list[int]:
    """Positions of spikes of one or two rows, after the beginning."""
    loss = signals.loss
    descent = max(loss.start - loss.lowest, 0.05 * abs(loss.start))
    left = loss.values - loss.smooth
    need = max(SIGMAS * loss.noise, DESCENT * descent, _reach(left))
    high = np.flatnonzero(left > need)
    gradient = signals.recording["grad_norm"]
    found = []
    for position in high.tolist():
        if position < max(8, len(loss) // 20):
            continue
        places = np.arange(max(0, position - 15), min(len(left), position + 16))
        around = left[np.setdiff1d(places, high)]  # Where two are broken, the other is no measure.
        if left[position] < SIGMAS * spread(around) or left[position] < 2.5 * around.max():
            continue
        row = int(loss.series.rows[position])
        before = gradient.finite.values[gradient.finite.rows < row][-31:]
        norm = signals.at("grad_norm", row)
        if norm is not None and len(before) and not norm > 1.5 * float(np.median(before)):
            continue
        found.append(position)
    return found


def _reach(left: Floats) -> float:
    """How far an ordinary batch may stand above the level: beyond the 97.5th percentile, the
    deviations of batches fade as fast as they do on the way there from the 90th."""
    later = left[max(8, len(left) // 20) :]
    usual, high = (float(value) for value in np.percentile(later, (90, 97.5)))
    decay = (high - usual) / np.log(4)
    return float(high + decay * (np.log(max(1.0, 0.025 * len(later))) + TAIL))
