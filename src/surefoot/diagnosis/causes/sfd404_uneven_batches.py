"""SFD404: batches of very different size."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import running_median
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.signals import Signals

FOLLOWS = 0.6
"""Rank correlation of a batch's loss, off its level, with its items: a sum, not a mean."""
TWICE = 2.0
UNEVEN = 4.0
SWING = 1.7
"""Factor between the deviations of small and of large batches."""


class UnevenBatches(Cause):
    """Batches of very different size: the loss swings with them."""

    info = CauseInfo(
        code="SFD404",
        slug="uneven-batches",
        severity=Severity.WARNING,
        certainty=Certainty.STRONG,
        title="Batches of very different size: the loss swings with them.",
        observes="The items of each batch (`weight`) from its tenth to its ninetieth percentile,"
        " how far the loss is off its level for small and for large ones, and whether it grows"
        " with the items, as a sum does. Quiet where a few last batches of an epoch are short.",
        why="The gradient of a batch of two has many times the noise of one of a hundred, at the"
        " same rate; and if the loss is a sum, also another size.",
        fix="Fill batches to one size (drop_last, packing, bucketing by length), or weigh the loss"
        " by the items of the whole window, as an exact accumulation does.",
        source="https://arxiv.org/abs/1706.02677 (batch size and rate belong together)",
        needs=(
            "loss",
            "weight",
        ),
        explains=(
            "bad-batch",
            "exploding-gradients",
            "rate-too-high-late",
            "rate-too-high",
            "rate-too-high-at-start",
            "validation-differs",
            "labels-unrelated",
        ),
    )

    def look(self, signals: Signals) -> Verdict | None:
        loss, weight = signals.recording.aligned("loss", "weight")[1:]
        sound = np.isfinite(loss) & np.isfinite(weight) & (weight > 0)
        loss, weight = loss[sound], weight[sound]
        if len(loss) < 30:
            return None
        low, high = (float(v) for v in np.percentile(weight, (10, 90)))
        if high < TWICE * low:
            return None
        off = loss - running_median(loss, max(5, len(loss) // 15) | 1)
        follows = float(np.corrcoef(_ranks(off), _ranks(weight))[0, 1])
        if follows > FOLLOWS:
            return Verdict(
                f"A batch holds {low:g} to {high:g} items (tenth and ninetieth percentile), and its"
                f" loss follows their number (rank correlation {follows:.2f}): it is a sum where a"
                " mean was meant.",
                weight=0.93,
                evidence={"items_p10": low, "items_p90": high, "rank_correlation": follows},
            )
        if high < UNEVEN * low:
            return None
        left = np.abs(off)
        middle = float(np.sqrt(low * high))
        small, large = left[weight < middle], left[weight >= middle]
        if len(small) < 5 or len(large) < 5:
            return None
        ratio = float(np.median(small)) / max(float(np.median(large)), 1e-30)
        if 1 / SWING < ratio < SWING:
            return None
        return Verdict(
            f"A batch holds {low:g} to {high:g} items (tenth and ninetieth percentile); small ones"
            f" are"
            f" {np.median(small):.3g} off the level of the loss, large ones"
            f" {np.median(large):.3g}.",
            weight=0.88,
            evidence={
                "items_p10": low,
                "items_p90": high,
                "deviation_small": float(np.median(small)),
                "deviation_large": float(np.median(large)),
            },
        )


def _ranks(values: Floats) -> Floats:
    """[N] place of each value among all; ties keep the order of the run."""
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks
