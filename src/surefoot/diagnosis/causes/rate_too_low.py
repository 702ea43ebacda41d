"""Causes: a learning rate that is too low, or that a schedule made so too early or for too long."""

from __future__ import annotations

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.causes.base import Sign, cause, sign
from surefoot.diagnosis.causes.page import own_page
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.needs import LOSS, RATE
from surefoot.diagnosis.robust import linearity


@cause(own_page("rate-too-low"), needs=(LOSS, RATE), min_losses=limits.MIN_ROWS, only_finite=True)
def rate_too_low(log: LogFeatures) -> Sign | None:
    """The learning rate is too low: the loss barely changes, or falls in a straight line."""
    motion, sum_is_below = log.weights.motion, log.schedule.sum_is_below
    if not len(log.rate) or log.recording.last_step < limits.MIN_UPDATES_TO_JUDGE_RATE:
        return None
    if motion == 0.0 and not sum_is_below(limits.MAX_SUM_OF_NO_RATES):
        return None
    small = sum_is_below(limits.MAX_SUM_OF_LOW_RATES)
    if motion is not None:
        small = motion < limits.MAX_MOTION_AT_LOW_RATE
    flat = abs(log.progress.drop) < 2 * limits.MAX_FLAT_DROP or log.progress.is_flat_within_noise
    if flat and small and not log.classes.ends_above_guess:
        return sign("barely-moves")
    # A gentle fine-tuning falls as straight.
    return None if log.classes.starts_above_guess else _falls_straight(log)


def _falls_straight(log: LogFeatures) -> Sign | None:
    loss, motion = log.loss, log.weights.motion
    early, middle, late = loss.level(0.1, 0.2), loss.level(0.45, 0.55), loss.level(0.9, 1.0)
    first, second, line = early - middle, middle - late, linearity(loss.smooth)
    # Most of it in the first updates, and little by little since, is a curve, not a line.
    if log.first_loss - early > limits.MAX_FALL_BEFORE_LINE * (first + second):
        return None
    sure, most = 4 * loss.standard_error(), float(limits.MAX_DROP_AT_LOW_RATE)
    straight = (line < -0.95 and _are_even(first, second)) or _is_straight_for_its_rate(log)
    straight = (straight and first + second > sure) or _validation_is_straight(log)
    hardly_moved = motion is not None and motion < limits.MAX_MOTION_AT_LOW_RATE
    if hardly_moved or log.classes.starts_at_guess(limits.MAX_FIRST_LOSS_OFF_GUESS):
        # From a guess on, a loss falls ever faster until it has learnt the first thing.
        most = 2 * most
        lasts = second > max(limits.MIN_EVENNESS_OF_LINE * first, sure)
        straight = straight or (lasts and line < limits.MAX_LINEARITY_OF_NOISY_LINE)
    validated = 0.0
    if log.evaluations.last is not None and log.first_loss > 0:
        validated = 1 - log.evaluations.last / log.first_loss
    moved = motion is not None and motion >= limits.MIN_MOTION_AT_HIGH_RATE
    if not straight or moved or max(log.progress.drop, validated) >= most:
        return None
    return sign("falls-straight", first_half=first, second_half=second, straightness=line)


def _are_even(first: float, second: float) -> bool:
    """Whether both halves bring about as much: a run that learns falls ever slower."""
    least = limits.MIN_EVENNESS_OF_LINE
    return least * first < second < first / least


def _is_straight_for_its_rate(log: LogFeatures) -> bool:
    """Whether the loss falls linearly with the sum of the rates."""
    loss, rate = log.loss, log.rate
    if len(rate) != len(loss) or float(loss.smooth.std()) == 0.0 or not rate.values.any():
        return False
    line = float(np.corrcoef(np.cumsum(rate.values), loss.smooth)[0, 1])
    first, second = (float(part) for part in log.progress.per_rate(2))
    return line < -0.95 and first > 0 and _are_even(first, second)


def _validation_is_straight(log: LogFeatures) -> bool:
    """The same of the evaluations, which have no noise of batches, of a run that began at a guess
    among a known number of classes: a gentle fine-tuning is as straight."""
    values, steps, rate = log.validation.values, log.validation.series.steps, log.rate
    if len(values) < 8 or float(values.std()) == 0.0 or not rate.values.any():
        return False
    if not log.classes.starts_at_guess(limits.MAX_FIRST_LOSS_OFF_GUESS):
        return False
    total = np.interp(steps, rate.series.steps, np.cumsum(rate.values))
    line = float(np.corrcoef(total, values)[0, 1])
    half = float(np.interp((total[0] + total[-1]) / 2, total, values))
    first, second = float(values[0]) - half, half - float(values[-1])
    return line < -0.99 and first > 0 and _are_even(first, second)


@cause(own_page("schedule-ends-early"), needs=(RATE,), only_finite=True)
def schedule_ends_early(log: LogFeatures) -> Sign | None:
    """The schedule ended long before the run did."""
    rate, values = log.rate, log.rate.values
    if len(rate) < 10 or float(values.max()) <= 0:
        return None
    peak = float(values.max())
    end = int(np.flatnonzero(values > limits.MAX_ENDED_RATE * peak)[-1]) + 1
    step, left = rate.step(min(end, len(rate) - 1)), 1 - end / len(rate)
    if left < limits.MIN_SHARE_AFTER_SCHEDULE:
        return None
    if float(np.median(values[end:])) > limits.MAX_STANDING_RATE * peak:
        before = values[max(0, end - max(3, len(rate) // 20)) : end]
        # A rate that had been held below its peak before it fell goes down in steps.
        in_steps = bool(np.ptp(before) < 1e-6 * peak and before[-1] < 0.5 * peak)
        if in_steps or not _stops_falling_at(log, step):
            return None
    total = gained = None
    if len(log.loss):
        total, gained = log.loss.drop, log.evaluations.training_loss_at(step) - log.loss.end
    return sign("ended", step=step, share_left=left, gained_since=gained, gained_in_all=total)


def _stops_falling_at(log: LogFeatures, step: float) -> bool:
    """Whether the loss was clearly falling up to a step, and is flat from there on."""
    loss = log.loss
    place, width = int(np.searchsorted(loss.series.steps, step)), len(loss) // 10
    if len(loss) < 40 or place < 2 * width or place > len(loss) - 2 * width:
        return False
    parts = (loss.values[place + first * width :][:width] for first in (-2, -1, 0))
    early, late, after = (float(np.median(part)) for part in parts)
    clear = max(limits.MIN_FALL_BEFORE_SCHEDULE_END * abs(loss.drop), 4 * loss.standard_error())
    return early - late > clear and after - loss.end < 0.25 * (early - late)


@cause(own_page("warmup-too-long"), needs=(RATE,), only_finite=True)
def warmup_too_long(log: LogFeatures) -> Sign | None:
    """The learning rate is still rising when the run ends."""
    values = log.rate.values
    if len(values) < 10:
        return None
    peak = float(values.max())
    rises = bool((np.diff(values) >= -1e-9 * peak).all()) and values[-1] >= peak
    if not rises or values[int(0.7 * len(values))] > limits.MAX_LATE_RATE_OF_RISE * peak:
        return None
    return sign("still-rising", first_rate=float(values[0]), last_rate=peak, step=log.rate.step(-1))
