"""SFD302: NaN or infinity in the data."""

from __future__ import annotations

import numpy as np

from surefoot.core.finding import Certainty, Severity
from surefoot.diagnosis.causes.base import Cause, CauseInfo, Verdict
from surefoot.diagnosis.signals import Signals


class NonFiniteData(Cause):
    """Some batch holds NaN or infinity."""

    info = CauseInfo(
        code="SFD302",
        slug="non-finite-data",
        severity=Severity.ERROR,
        certainty=Certainty.STRONG,
        title="Some batch holds NaN or infinity.",
        observes="Loss and gradients before the first NaN: in order to the very end. Whether the"
        " data had been seen before without one; the sample that all broken windows share. Quiet"
        " where loss or gradients had grown before.",
        why="One NaN in an input makes the loss NaN whatever the rate, and one update with it"
        " makes every weight NaN.",
        fix="Look at the samples of that window (`sample_ids` of its row) and clean them;"
        " guard.non_finite=skip leaves such updates out until then.",
        source="https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
        needs=("loss",),
        explains=("bad-batch",),
    )

    def look(self, signals: Signals) -> Verdict | None:
        broke = signals.broke_at
        if broke is None:
            return None
        value, finite = signals.at("loss", broke), signals.inputs_are_finite
        if finite is False:
            step = signals.step_of_row(broke)
            return Verdict(
                f"At step {step} inputs are not finite, and loss or gradient with them.",
                weight=0.96,
                evidence={"step": step, "broken_windows": len(signals.broken_rows)},
                certainty=Certainty.PROOF,
            )
        if finite or value is None or np.isfinite(value) or np.isinf(value):
            return None
        if signals.growth_before_break > 3:
            return None
        step = signals.step_of_row(broke)
        before = signals.before_row("loss", broke)
        recovers = _comes_and_goes(signals)
        shared = _shared_ids(signals)
        seen = _seen_before(signals, broke)
        weight = 0.5 if _innocent(signals) else 0.9 if shared else 0.85 if recovers else 0.78
        text = f" Of the windows that broke, all hold sample {shared[0]}." if shared else ""
        if recovers:
            text += f" {len(signals.broken_rows)} windows broke; those between are in order."
        if not shared and not recovers:
            text += (
                " All its samples had gone through before without harm: either what is stored has"
                " changed, augmentation made it, or it is 0/0 inside the loss function."
                if seen
                else " 0/0 inside the loss function would look the same; samples that are new to"
                " the run are likelier."
            )
        last = f"just before it was {before[-1]:.4g}" if len(before) else "it is the first row"
        return Verdict(
            f"The loss is NaN at step {step}; {last}, in its ordinary range.{text}",
            weight=weight,
            evidence={
                "step": step,
                "loss_before": float(before[-1]) if len(before) else None,
                "broken_windows": len(signals.broken_rows),
                "shared_samples": list(shared[:8]),
                "data_seen_before": seen,
            },
        )


def _innocent(signals: Signals) -> bool:
    """Whether there are several broken windows, and each of their samples is in a sound one."""
    ids, broken = signals.recording.sample_ids, signals.broken_rows
    if len(broken & ids.keys()) < 2 or not _comes_and_goes(signals):
        return False
    sound = {sample for row, samples in ids.items() if row not in broken for sample in samples}
    return all(set(ids[row]) <= sound for row in broken & ids.keys())


def _comes_and_goes(signals: Signals) -> bool:
    """Whether the loss is finite again after the first row that was not."""
    loss = signals.recording["loss"]
    after = loss.values[loss.rows > (signals.broke_at or 0)]
    return bool(np.isfinite(after).any())


def _shared_ids(signals: Signals) -> tuple[int, ...]:
    """Samples that occur in every broken window, where there are at least two of them."""
    ids = signals.recording.sample_ids
    broken = [set(ids[row]) for row in sorted(signals.broken_rows) if row in ids]
    if len(broken) < 2 or not _comes_and_goes(signals):
        return ()
    return tuple(sorted(set.intersection(*broken)))


def _seen_before(signals: Signals, broke: int) -> bool:
    """Whether all samples of the broken window had gone through before without harm."""
    ids = signals.recording.sample_ids
    if broke in ids:
        earlier = {sample for row, samples in ids.items() if row < broke for sample in samples}
        return set(ids[broke]) <= earlier
    epochs = signals.before_row("epoch", broke)
    return len(epochs) > 0 and float(epochs[-1]) >= 1.0
