"""Causes of values that are not finite: overflow of fp16, the data, the loss function."""

from __future__ import annotations

import math

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.causes.base import Sign, cause, sign
from surefoot.diagnosis.causes.page import own_page
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.needs import ANY_LOSS


@cause(own_page("half-precision-overflow"), needs=(ANY_LOSS,))
def half_precision_overflow(log: LogFeatures) -> Sign | None:
    """Gradients overflow repeatedly in fp16."""
    scale = log.recording["loss_scale"].finite.values
    if len(scale) >= limits.MIN_ROWS and not (scale == 1.0).all():
        return _overflows_again(log) if float(np.ptp(scale)) == 0.0 else _scale_falls(log)
    if (seen := _overflows_and_goes_on(log)) is not None:
        return seen
    if not log.breakage.is_fp16 or log.breakage.growth_before > limits.MIN_GROWTH_TO_INFINITY:
        return None
    if log.is_finite:
        return _overflows_again(log)
    broke = log.breakage
    return sign("breaks-without-scale", step=broke.step, loss=broke.loss, precision="fp16")


def _overflows_and_goes_on(log: LogFeatures) -> Sign | None:
    """Infinite gradient norms again and again under a loss that stays finite: had one of them been
    used, the weights would be gone; so a loss scaler skips those updates."""
    norms, loss = log.recording["grad_norm"], log.recording["loss"].values
    infinite = np.isinf(norms.values)
    if np.isnan(norms.values).any() or not len(loss) or not np.isfinite(loss).all():
        return None
    if infinite.sum() < 5 or infinite.mean() < limits.MIN_OVERFLOW_SHARE or infinite.all():
        return None
    first = int(infinite.argmax())
    return sign(
        "overflows-and-goes-on",
        not_finite=int(infinite.sum()),
        share=float(infinite.mean()),
        first_step=norms.step(first),
    )


def _overflows_again(log: LogFeatures) -> Sign | None:
    """A scale that never moves, or none: each overflow loses an update, and they go on."""
    overflows = sorted(log.breakage.overflow_rows | log.breakage.rows)
    share = len(overflows) / max(1, log.recording.num_rows)
    if len(overflows) < 5 or share < limits.MIN_OVERFLOW_SHARE:
        return None
    scales = log.recording["loss_scale"].finite.values
    return sign(
        "overflows-under-fixed-scale" if len(scales) else "overflows-without-scale",
        scale=float(scales[0]) if len(scales) else None,
        not_finite=len(overflows),
        share=share,
        first_step=log.recording.step_of_row(overflows[0]),
    )


def _scale_falls(log: LogFeatures) -> Sign | None:
    scale = log.recording["loss_scale"].finite
    late = scale.values[len(scale) // 20 :]
    highest, lowest = float(late.max()), float(late.min())
    after = max(float(late[int(late.argmax()) :].min()), 1e-30)
    halvings = math.log2(highest / after) if highest > 0 else 0.0
    times = int((np.diff(late) < 0).sum())
    broken = len(log.breakage.rows | log.breakage.overflow_rows)
    often = broken / max(1, log.recording.num_rows) > limits.MIN_OVERFLOW_SHARE and times >= 5
    if halvings < limits.MIN_HALVINGS_OF_SCALE and lowest >= 1.0 and not often:
        return None
    return sign(
        "scale-falls",
        highest_scale=highest,
        lowest_scale=lowest,
        lowest_step=scale.step(int(scale.values.argmin())),
        steps_down=times,
        not_finite=broken,
    )


def _last_before(log: LogFeatures) -> float | None:
    return log.breakage.losses_before[-1] if log.breakage.losses_before else None


@cause(own_page("non-finite-data"), needs=(ANY_LOSS,))
def non_finite_data(log: LogFeatures) -> Sign | None:
    """A batch contains NaN or infinity."""
    broke = log.breakage
    if log.is_finite:
        return None
    if broke.inputs_are_finite is False:
        return sign("inputs-not-finite", step=broke.step, broken_windows=len(broke.rows))
    is_nan = broke.loss is not None and math.isnan(broke.loss)
    if broke.inputs_are_finite or not is_nan or broke.growth_before > limits.MIN_GROWTH_TO_INFINITY:
        return None
    shared, seen = _shared_samples(log), _samples_seen_before(log)
    if _all_samples_innocent(log):
        name = "comes-and-goes-on-sound-samples"
    elif shared:
        name = "shared-sample"
    elif broke.comes_and_goes:
        name = "comes-and-goes"
    else:
        name = "seen-before" if seen else "new-samples"
    return sign(
        name,
        step=broke.step,
        loss_before=_last_before(log),
        broken_windows=len(broke.rows),
        shared_sample=shared[0] if shared else None,
        shared_samples=list(shared[:8]),
        data_seen_before=seen,
    )


def _all_samples_innocent(log: LogFeatures) -> bool:
    """Whether there are several broken windows, and each of their samples is in a sound one."""
    ids, broken = log.recording.sample_ids, log.breakage.rows
    if len(broken & ids.keys()) < 2 or not log.breakage.comes_and_goes:
        return False
    sound = {sample for row, samples in ids.items() if row not in broken for sample in samples}
    return all(set(ids[row]) <= sound for row in broken & ids.keys())


def _shared_samples(log: LogFeatures) -> tuple[int, ...]:
    """Samples that occur in every broken window, where there are at least two of them."""
    ids = log.recording.sample_ids
    broken = [set(ids[row]) for row in sorted(log.breakage.rows) if row in ids]
    if len(broken) < 2 or not log.breakage.comes_and_goes:
        return ()
    return tuple(sorted(set.intersection(*broken)))


def _samples_seen_before(log: LogFeatures) -> bool:
    """Whether all samples of the broken window had gone through before without harm."""
    ids, row = log.recording.sample_ids, log.breakage.row or 0
    if row in ids:
        earlier = {sample for r, samples in ids.items() if r < row for sample in samples}
        return set(ids[row]) <= earlier
    epochs = log.recording.before_row("epoch", row)
    return len(epochs) > 0 and float(epochs[-1]) >= 1.0


@cause(own_page("non-finite-loss-function"), needs=(ANY_LOSS,))
def non_finite_loss_function(log: LogFeatures) -> Sign | None:
    """The loss function divides by zero, or takes the log or square root of zero."""
    broke = log.breakage
    if log.is_finite or broke.inputs_are_finite is False or broke.loss is None:
        return None
    if broke.growth_before > limits.MIN_GROWTH_TO_INFINITY:
        return None
    if math.isinf(broke.loss):
        name = "infinite-loss"
    elif math.isfinite(broke.loss):
        name = "infinite-gradient"
    else:
        name = "nan-on-finite-inputs" if broke.inputs_are_finite else "nan"
    norm = log.recording.value_in_row("grad_norm", broke.row or 0)
    before = _last_before(log)
    return sign(name, step=broke.step, loss=broke.loss, grad_norm=norm, loss_before=before)
