"""SFD404: batches of very different size."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.curve import ranks, running_median
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.signals import Signals

FOLLOWS = 0.6
"""Rank correlation of a batch's loss, off its level, with its items: a sum, not a mean."""
TWICE = 2.0
UNEVEN = 4.0
OFTEN = 0.25
"""Share of the batches that are small: the last ones of short epochs are fewer."""
FEW = 0.1
"""Share of the batches that are large."""
MANY_SHORT = 6
"""Short batches whose losses tell more than chance."""
SWING = 1.6
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
        if (short := _short_ones_are_sums(loss, weight)) is not None:
            return short
        if high < TWICE * low:
            return None
        off = loss - running_median(loss, max(5, len(loss) // 15) | 1)
        follows = float(np.corrcoef(ranks(off), ranks(weight))[0, 1])
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
        # On the scale of the time: late in a run all is smaller.
        left = np.abs(off) / np.maximum(
            running_median(np.abs(off), max(31, len(off) // 5) | 1), 1e-30
        )
        middle = float(np.sqrt(low * high))
        small, large = left[weight < middle], left[weight >= middle]
        if len(small) < OFTEN * len(left) or len(large) < max(5, FEW * len(left)):
            return None
        ratio = float(np.exp(np.mean(np.log(_quantiles(small) / _quantiles(large)))))
        if 1 / SWING < ratio < SWING:
            return None
        return Verdict(
            f"A batch holds {low:g} to {high:g} items (tenth and ninetieth percentile); small ones"
            f" are"
            f" {ratio:.3g} times as far off the level of the loss as large ones.",
            weight=0.88,
            evidence={
                "items_p10": low,
                "items_p90": high,
                "deviation_ratio": ratio,
            },
        )


def _short_ones_are_sums(loss: Floats, weight: Floats) -> Verdict | None:
    """Of batches of one size but for the last ones of epochs: whether the loss of these is as much
    smaller as they are."""
    usual = float(np.median(weight))
    short = weight < usual / 1.3
    if (weight == usual).mean() < 1 - OFTEN or short.sum() < MANY_SHORT:
        return None
    level = running_median(loss, max(5, len(loss) // 15) | 1)[short]
    sound = level > 0
    if sound.sum() < MANY_SHORT:
        return None
    ratio, expected = loss[short][sound] / level[sound], weight[short][sound] / usual
    # Nearer to what a sum has than to what a mean has.
    if float((ratio < np.sqrt(expected)).mean()) < 0.9:
        return None
    return Verdict(
        f"Batches hold {usual:g} items but for {short.sum()} short ones, whose loss is"
        f" {np.median(ratio):.2g} of the level around them ({np.median(expected):.2g} of the"
        " items): it is a sum where a mean was meant.",
        weight=0.88,
        evidence={"items": usual, "short_batches": int(short.sum())},
    )


def _quantiles(deviations: Floats) -> Floats:
    """Half of them, three quarters and nine tenths are below these."""
    return np.maximum(np.percentile(deviations, (50, 75, 90)), 1e-30)
