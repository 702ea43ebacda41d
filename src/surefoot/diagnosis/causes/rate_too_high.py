"""Causes: a learning rate that is too high, for the whole run, its start, or its end."""

from __future__ import annotations

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.causes.base import Sign, cause, sign
from surefoot.diagnosis.causes.page import own_page
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.needs import LOSS, RATE
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.robust import running_median, spread

# -- for the whole run -----------------------------------------------------------------------------


@cause(own_page("rate-too-high"), needs=(LOSS,))
def rate_too_high(log: LogFeatures) -> Sign | None:
    """The learning rate is too high: the loss diverges, or fluctuates without a trend."""
    if not log.is_finite:
        return _grew_to_infinity(log)
    motion = log.weights.motion
    rest = motion is not None and motion < limits.MIN_MOTION_AT_HIGH_RATE
    if not log.has_shape or motion == 0.0 or (rest and log.weights.known_from_start):
        return None
    if log.gradients.spikes_from_start:
        return None
    if (seen := _stands_above_start(log) or _moved_too_far_at_once(log)) is not None:
        return seen
    if log.loss.noise < limits.MAX_NOISE_OF_STEADY_LOSS * abs(log.loss.end):
        return None
    return _bounces(log) or _evaluations_bounce(log) or _weights_ran(log) or _wanders(log)


def _grew_to_infinity(log: LogFeatures) -> Sign | None:
    broke, first = log.breakage, log.first_loss
    before, growth = broke.losses_before, broke.growth_before
    if not before or growth < limits.MIN_GROWTH_TO_INFINITY:
        return None
    if max(before[-3:]) < limits.LOW_LOSS * first and first > 0:
        return None  # Once a loss is low, single batches differ by factors.
    return sign("grew-to-infinity", step=broke.step, growth=growth, loss_before=before[-1])


def _stands_above_start(log: LogFeatures) -> Sign | None:
    loss, first = log.loss, log.first_loss
    far = max(limits.MIN_DIVERGED_RISE * abs(first), 3 * log.start.standard_error)
    long = log.progress.share_above_first > limits.MIN_SHARE_ABOVE_FIRST
    if loss.end - first <= far and not long:
        return None
    return sign("stands-above-start", highest_step=loss.step(int(loss.smooth.argmax())))


def _moved_too_far_at_once(log: LogFeatures) -> Sign | None:
    loss = log.loss
    peak = float(loss.values[: max(limits.LASTING_ROWS, len(loss) // 20)].max())
    grew = log.weights.grew_by_more_than(limits.MIN_RUNAWAY_GROWTH)
    little = log.progress.drop < limits.MAX_DROP_AFTER_RUNAWAY / 2
    if not grew or not little or peak <= limits.MIN_THROWN_LOSS * abs(log.first_loss):
        return None
    return sign("moved-too-far", peak_loss=peak)


def _bounces(log: LogFeatures) -> Sign | None:
    loss, start = log.loss, log.start
    first, rose = abs(start.loss), loss.end - start.loss
    grew = log.weights.grew_by_more_than(limits.MIN_RUNAWAY_GROWTH)
    peak = float(running_median(loss.values, limits.LASTING_ROWS).max())
    jumped = peak > start.loss + max(limits.MIN_DIVERGED_RISE * first, 4 * loss.noise)
    near = limits.MAX_FLAT_DROP * (3 if grew and jumped else 1)
    sure = max(3 * loss.standard_error(), 2 * start.standard_error)
    rises = rose > max(limits.MIN_BOUNCE_RISE * first, sure) and not _evaluations_rest(log)
    moved = grew or (jumped and not start.is_vague)
    if not rises and not (moved and rose > -near * first):
        return None
    return sign("bounces-and-weights-grew" if grew else "bounces")


def _evaluations_rest(log: LogFeatures) -> bool:
    found = log.evaluations
    return len(found.losses) > 3 and found.curvature_of_level < limits.MAX_CURVATURE_AT_REST


def _evaluations_bounce(log: LogFeatures) -> Sign | None:
    bounce = log.evaluations.curvature_of_level * abs(log.loss.end)
    if not log.progress.is_flat_within_noise or _evaluations_rest(log):
        return None
    if bounce <= limits.MIN_BOUNCE_PER_NOISE * log.loss.noise:
        return None
    return sign("evaluations-bounce", validation_sway=bounce)


def _weights_ran(log: LogFeatures) -> Sign | None:
    norms = log.weights.norms
    if len(norms) < 10 or norms[0] <= 0 or not log.weights.known_from_start:
        return None
    early = float(norms[: max(2, len(norms) // 4)].max() / norms[0])
    far = early > limits.FAR_RUNAWAY_GROWTH
    most = limits.MAX_DROP_AFTER_FAR_RUNAWAY if far else limits.MAX_DROP_AFTER_RUNAWAY
    if early < limits.MIN_RUNAWAY_GROWTH or log.evaluations.are_steady:
        return None
    if not 0 < log.progress.drop < most:
        return None
    return sign("weights-ran", weight_norm_growth_early=early)


def _wanders(log: LogFeatures) -> Sign | None:
    if log.schedule.is_kept is None or log.first_loss <= 0 or log.progress.is_flat_within_noise:
        return None
    if log.schedule.is_kept:
        return _lost_its_gain(log) or _hardly_gains(log)
    loss, rate = log.loss, log.rate
    above = loss.smooth[len(loss) // 10 :] > (1 + limits.MIN_RISE_ABOVE_FIRST) * log.first_loss
    highest_at = loss.step(int(loss.smooth.argmax()))
    rate_there = float(np.interp(highest_at, rate.series.steps, rate.values))
    if above.mean() <= limits.MIN_SHARE_ABOVE_FIRST_AT_PEAK_RATE:
        return None
    if loss.values.max() <= 3 * log.first_loss or rate_there <= 0.5 * float(rate.values.max()):
        return None
    highest = float(loss.values.max())
    return sign("came-back", share_after_tenth=float(above.mean()), highest_loss=highest)


def _lost_its_gain(log: LogFeatures) -> Sign | None:
    loss, first = log.loss, log.first_loss
    gained, lost = first - loss.lowest, loss.end - loss.lowest
    if loss.lowest_at >= 0.7 * len(loss) or gained <= 0.1 * first:
        return None
    if lost <= max(limits.MIN_GAIN_LOST_AGAIN * gained, 4 * loss.standard_error()):
        return None
    return sign("lost-its-gain", lowest_loss=loss.lowest, lowest_step=loss.step(loss.lowest_at))


def _hardly_gains(log: LogFeatures) -> Sign | None:
    loss, bounce = log.loss, log.evaluations.curvature_of_gain
    little = limits.MAX_FLAT_DROP < log.progress.drop < limits.MAX_DROP_OF_WANDERING
    stands = loss.level(0.5, 0.75) - loss.end < 0.35 * (log.first_loss - loss.end)
    if not little or not stands or bounce <= limits.MIN_BOUNCE_OF_WANDERING:
        return None
    return sign("wanders", validation_jitter=bounce)


# -- for the first updates -------------------------------------------------------------------------


@cause(own_page("rate-too-high-at-start"), needs=(LOSS,))
def rate_too_high_at_start(log: LogFeatures) -> Sign | None:
    """The first updates run at the full learning rate, without a warm-up, and the loss jumps."""
    if log.schedule.starts_at_peak is False:
        return None
    if log.is_finite:
        return (_weights_moved_too_far(log) or _jumped_at_start(log)) if log.has_shape else None
    early = len(log.breakage.losses_before) <= limits.MAX_ROWS_BEFORE_EARLY_BREAK
    if not early or log.breakage.growth_before < limits.MIN_GROWTH_AT_START:
        return None
    return sign("broke-at-start", step=log.breakage.step, growth=log.breakage.growth_before)


def _rows_after_first(log: LogFeatures) -> Floats:
    return log.loss.values[1 : max(4, len(log.loss) // 20) + 1]


def _weights_moved_too_far(log: LogFeatures) -> Sign | None:
    growth = log.weights.lasting_early_growth
    if growth is None or log.schedule.starts_at_peak is not True:
        return None
    # Where nothing was learnt at a rate that is kept, it is the rate of the whole run.
    if log.progress.drop < limits.MIN_DROP_AFTER_THROW and log.schedule.is_kept:
        return None
    # Small weights grow as fast at a good rate; then the loss does not rise.
    if _rows_after_first(log).max() < limits.MIN_LOSS_RISE_OF_THROW * abs(log.first_loss):
        return None
    return sign("weights-moved-too-far", weight_norm_growth_early=growth)


def _jumped_at_start(log: LogFeatures) -> Sign | None:
    loss, rows = log.loss, _rows_after_first(log)
    first, few = log.first_loss, limits.LASTING_ROWS
    if log.start.is_logged:
        is_lowest = loss.values[0] < rows[:few].min()
        first = float(loss.values[0] if is_lowest else max(first, loss.values[0]))
    peak, least = float(rows.max()), limits.MIN_START_JUMP * abs(first)
    hump, jump = float(running_median(rows, few).max()) - first, max(least, 5 * log.start.noise)
    lasts = peak - first > jump and hump > max(jump / 2, least)
    if not (lasts or _adds_up(log, first) or _kicks(log, first) or _is_worse_than_guess(log)):
        return None
    if log.gradients.spikes_from_start and hump < 10 * loss.noise:
        return None
    # Where rows stand as high as often in the later half, the start is no exception.
    high = first + max(hump, jump) / 2
    if float((loss.part(0.5, 1) > high).mean()) > 0.5 * float((rows > high).mean()):
        return None
    above = float((loss.smooth > first + limits.MIN_RISE_ABOVE_FIRST * abs(first)).mean())
    recovers = loss.end < first - limits.MIN_RECOVERED_DROP * abs(first)
    if log.schedule.is_kept is not False and not (recovers and above < limits.MAX_RECOVERY_SHARE):
        return None
    return sign(
        "jumped-at-full-rate" if log.schedule.starts_at_peak else "jumped",
        first_loss=first,
        peak_loss=peak,
        peak_step=loss.step(1 + int(rows.argmax())),
    )


def _adds_up(log: LogFeatures, first: float) -> bool:
    """Whether the first rows stand far above the first loss, added up, with gradients that grew by
    more than those of a hard batch, whose norm grows as the root of a squared error's loss."""
    few, rows, noise = limits.LASTING_ROWS, _rows_after_first(log), _noise_after_start(log)
    peak, norms = float(rows.max()), log.gradient.values[: 2 * few]
    expected = (peak / first) ** 0.5 if first > 0 else 1.0
    known = len(norms) >= few and norms[0] > 0
    if known and not norms[1:].max() > limits.MIN_GRADIENT_BEYOND_LOSS * expected * norms[0]:
        return False
    least = limits.MIN_SUM_ABOVE_FIRST if known else limits.MIN_SUM_ABOVE_FIRST_WITHOUT_NORMS
    total = float(np.maximum(rows[: 2 * few] - first, 0).sum())
    high = peak - first > max(limits.MIN_SUM_ABOVE_FIRST / 2 * abs(first), 5 * noise)
    return high and total > max(least * abs(first), 10 * noise)


def _kicks(log: LogFeatures, first: float) -> bool:
    """Whether loss and gradient norm shoot up with the very first update or the second."""
    norms = log.gradient.values
    if log.schedule.starts_at_peak is not True or not log.start.is_logged:
        return False
    if len(norms) < limits.LASTING_ROWS or norms[0] <= 0:
        return False
    jump = max(limits.MIN_KICK * abs(first), 8 * _noise_after_start(log))
    grew = bool(norms[1:3].max() > limits.MIN_GRADIENT_KICK * norms[0])
    return grew and float(log.loss.values[1:3].max()) - first > jump


def _is_worse_than_guess(log: LogFeatures) -> bool:
    """Whether a loss that begins at log(C) is soon far above it: no batch is so hard to guess."""
    guess = log.classes.guess_loss
    if guess is None or log.schedule.starts_at_peak is not True:
        return False
    near = abs(float(log.loss.values[0]) / guess - 1) < limits.MAX_FIRST_LOSS_OFF_GUESS
    return near and float(_rows_after_first(log).max()) > limits.MIN_LOSS_OVER_GUESS * guess


def _noise_after_start(log: LogFeatures) -> float:
    """Standard deviation of a row, from the differences of neighbours after the first rows."""
    few = limits.LASTING_ROWS
    values = log.loss.values[few : few + limits.ROWS_OF_NOISE_AFTER_START]
    return spread(np.diff(values)) / 2**0.5 if len(values) > 2 else log.start.noise


# -- for the end -----------------------------------------------------------------------------------


@cause(own_page("rate-too-high-late"), needs=(LOSS, RATE), min_losses=40, only_finite=True)
def rate_too_high_late(log: LogFeatures) -> Sign | None:
    """The learning rate that suited the start is too high later: the loss stays on a noisy
    plateau."""
    loss, growth, found = log.loss, log.weights.growth, log.evaluations
    if not log.schedule.is_kept or log.gradients.spikes_from_start:
        return None
    if log.progress.drop < limits.MIN_DROP_TO_PLATEAU or log.progress.is_flat_within_noise:
        return None
    ran = log.weights.grew_by_more_than(limits.MIN_GROWTH_ON_PLATEAU) and not found.are_steady
    bounces = found.curvature_of_gain > limits.MIN_BOUNCE_ON_PLATEAU
    bounces = bounces and log.progress.late_fall < limits.MAX_FALL_OF_FITTING_RUN
    # Of weights that have not gone far, a small bounce is the noise of small batches.
    if growth is None or growth > limits.MIN_GROWTH_OF_SMALL_BOUNCE:
        bounces = bounces or _bounces_on_plateau(log)
    total = loss.drop if loss.drop > 0 else 1e-30
    most = limits.MAX_LATE_FALL * (2 if ran else 1)
    plateau, late = loss.level(0.55, 0.75), loss.level(0.8, 1.0)
    stalls = (plateau - late) / total <= most
    if not stalls or (loss.level(0.3, 0.5) - late) / total > 1.5 * most + 0.05:
        return None
    if not ran and not bounces:
        return None
    return sign(
        "both" if ran and bounces else "weights-ran" if ran else "evaluations-bounce",
        level_at_two_thirds=plateau,
        last_rate=float(np.median(log.rate.part(0.9, 1))),
        validation_jitter=found.curvature_of_gain,
    )


def _bounces_on_plateau(log: LogFeatures) -> bool:
    """Whether the training loss stands, and evaluations bounce: by a good share of their level
    where they had followed; or, where they stand too, by more than a run at its floor does."""
    found, losses = log.evaluations, log.validation
    if abs(log.progress.late_fall) >= limits.MAX_FALL_ON_PLATEAU:
        return False
    if len(losses) >= 5 and found.curvature_of_level > limits.MIN_BOUNCE_OF_LEVEL:
        gained = log.first_loss - float(np.median(losses.part(0.4, 1)))
        if gained > 0.5 * (log.first_loss - log.loss.end):
            return True
    by_level = found.curvature_of_level > limits.MIN_BOUNCE_OF_LEVEL / 15
    by_gain = found.curvature_of_gain > limits.MIN_BOUNCE_ON_PLATEAU / 4
    return by_level and by_gain and found.gain_in_second_half < limits.MAX_LATE_GAIN_ON_PLATEAU
