"""Causes in the gradients: they explode, vanish, add up, move nothing, or spike in one tower."""

from __future__ import annotations

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.causes.base import Sign, cause, sign
from surefoot.diagnosis.causes.page import own_page
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.needs import GRADIENT, GRADIENT_PER_TOWER, LOSS
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.robust import linearity, median_before, ranks, spikes

# -- exploding -------------------------------------------------------------------------------------


@cause(own_page("exploding-gradients"), needs=(LOSS, GRADIENT))
def exploding_gradients(log: LogFeatures) -> Sign | None:
    """The gradient norm spikes repeatedly."""
    gradient = log.gradient
    if (seen := _overflows_at_once(log)) is not None:
        return seen
    if len(gradient) < 20 or not log.has_shape:
        return None
    early = float(np.median(gradient.part(0, 0.1)))
    if (seen := _spikes(log, early) or _starts_out_of_scale(log)) is not None:
        return seen
    if early > 0 and gradient.end > limits.MIN_GROWTH_OF_NORM * early and gradient.end > 10:
        return sign("grows", early_grad_norm=early, last_grad_norm=gradient.end)
    return None


def _overflows_at_once(log: LogFeatures) -> Sign | None:
    if log.is_finite or not len(log.loss) or not _starts_above_guess(log):
        return None
    if len(log.breakage.losses_before) > limits.MAX_ROWS_BEFORE_OVERFLOW:
        return None
    first = float(log.loss.values[0])
    return sign("overflows-at-once", first_loss=first, step=log.breakage.step)


def _spikes(log: LogFeatures, early: float) -> Sign | None:
    gradient, usual = log.gradient, float(np.median(log.gradient.values))
    found = _beyond_the_loss(log, spikes(gradient.series, limits.MIN_GRADIENT_SPIKE))
    # Ten times nothing, after the gradients have faded, explodes nowhere.
    far = int((gradient.values[found] > max(10 * usual, 3 * early)).sum())
    if len(found) < 4 or len(found) <= limits.MIN_SPIKE_SHARE * len(gradient):
        return None
    if far < limits.MIN_FAR_SPIKES:
        return None
    worst = max(found, key=lambda position: gradient.values[position])
    return sign(
        # Such norms before any weight had moved were made by no learning rate.
        "spikes-from-start" if log.gradients.spikes_from_start else "spikes",
        spikes=len(found),
        updates=len(gradient),
        factor=float(limits.MIN_GRADIENT_SPIKE),
        worst_grad_norm=float(gradient.values[worst]),
        worst_step=gradient.step(worst),
        first_steps=[gradient.step(position) for position in found[:8]],
    )


def _beyond_the_loss(log: LogFeatures, found: list[int]) -> list[int]:
    """Those spikes at which the loss has not grown alike: once a loss is low, a hard batch has many
    times as much of both."""
    series, loss = log.gradient.series, log.loss.series
    usual_loss, usual_norm = median_before(loss.values), median_before(series.values)
    left = []
    for position in found:
        place = int(np.searchsorted(loss.rows, series.rows[position]))
        is_row = place < len(loss) and loss.rows[place] == series.rows[position]
        is_low = is_row and 0 < usual_loss[place] < limits.LOW_LOSS * log.first_loss
        harder = max(1.0, loss.values[place] / usual_loss[place] if is_low else 1.0)
        if (
            series.values[position]
            > limits.MIN_SPIKE_BEYOND_EXPECTED * harder * usual_norm[position]
        ):
            left.append(position)
    return left


def _starts_out_of_scale(log: LogFeatures) -> Sign | None:
    """A first loss that changes far too much with the weights, where the gradient of each batch is
    another, the loss is far above that of a guess, or the gradient is as large to the end."""
    loss, norms = log.loss, log.gradient.values
    if not log.start.is_logged or not log.weights.known_from_start or loss.values[0] <= 0:
        return None
    if log.weights.lasting_early_growth is not None:
        return None
    first = float(loss.values[0])
    steep = float(norms[0]) * float(log.weights.norms[0]) / first
    early = norms[: max(limits.ROWS_OF_FIRST_NORMS, len(norms) // 10)]
    factor = np.exp(np.median(np.abs(np.diff(np.log(np.maximum(early, 1e-30))))))
    # One that falls to nothing differs by factors, too.
    fades = np.median(early) <= limits.MAX_FADED_NORM * early[0]
    unsteady = factor > limits.MIN_FACTOR_OF_UNSTEADY_NORM and not fades
    stays = float(np.median(norms)) > limits.MIN_NORM_PER_FIRST_LOSS * first
    stays = stays and steep > 3 * limits.MIN_STEEP_SENSITIVITY
    if steep <= limits.MIN_STEEP_SENSITIVITY:
        return None
    if not unsteady and not stays and not _starts_above_guess(log):
        return None
    return sign(
        "out-of-scale",
        first_loss=first,
        first_grad_norm=float(norms[0]),
        relative_change_of_loss=steep,
        worst_grad_norm=float(norms.max()),
    )


def _starts_above_guess(log: LogFeatures) -> bool:
    """Whether a loss over classes, or a vocabulary, begins at several times that of a guess."""
    unknown = limits.LARGE_VOCABULARY if log.classes.is_language else None
    classes = log.classes.known or unknown
    if classes is None:
        return False
    return float(log.loss.values[0]) > limits.MIN_FIRST_LOSS_OVER_GUESS * float(np.log(classes))


# -- vanishing -------------------------------------------------------------------------------------


@cause(
    own_page("vanishing-gradients"),
    needs=(LOSS, GRADIENT),
    min_losses=limits.MIN_ROWS,
    only_finite=True,
)
def vanishing_gradients(log: LogFeatures) -> Sign | None:
    """The gradient norm is near zero while the loss stays high."""
    loss, gradient, first = log.loss, log.gradient, log.first_loss
    motion, sensitivity, skill = log.weights.motion, log.gradients.sensitivity, log.classes.skill
    if len(gradient) < 10 or not gradient.values.any():
        return None
    if motion == 0.0 and not log.gradients.is_tiny:
        return None
    still = max(0.02 * abs(first), 3 * loss.standard_error())
    most = first + max(0.1 * first, 3 * log.start.standard_error)
    # A first loss of any size says nothing where the answers are a guess's to the end.
    guesses = skill is not None and skill < limits.MAX_SKILL_OF_GUESS
    if loss.level(0.6, 0.8) - loss.end >= still or loss.end >= most:
        return None
    if loss.end <= 0.5 * first and not guesses:
        return None
    late, highest = float(np.median(gradient.part(0.7, 1))), float(gradient.smooth.max())
    learnt_mean = guesses and _weights_rest(log)
    if learnt_mean:
        # The first updates have found the mean of all answers, and nothing after them.
        highest = max(highest, float(np.median(gradient.values[:3])))
        learnt_mean = late < limits.MAX_NORM_AFTER_MEAN * highest
    quiet = loss.noise < limits.MAX_NOISE_OF_SAME_ANSWER * loss.end
    quiet = quiet and not _norm_falls_with_rate(log, limits.MAX_FADED_NORM_OF_SAME_ANSWER * highest)
    bound = limits.MAX_FADED_NORM_OF_SAME_ANSWER if quiet else limits.MAX_VANISHED_NORM
    lost = loss.lowest < 0.85 * first and loss.end > 0.93 * first
    if lost and loss.noise < 0.01 * loss.end:
        bound = limits.MAX_FADED_NORM_AFTER_LOSS
    numbers: dict[str, object] = {
        "last_grad_norm": late,
        "highest_grad_norm": highest,
        "sensitivity": sensitivity,
    }
    if late < bound * highest or learnt_mean or late == 0.0:
        return Sign("fell", numbers)
    if (levels := _levels_of_parts(log)) is not None:
        return Sign("lost-on-the-way", numbers | levels)
    tiny = late < limits.MAX_SENSITIVITY_OF_VANISHED / 20 * abs(loss.end)
    if sensitivity is not None:
        tiny = sensitivity < limits.MAX_SENSITIVITY_OF_VANISHED
    stuck = motion is not None and motion < limits.MAX_MOTION_AT_LOW_RATE
    if tiny and (stuck or log.progress.is_flat_within_noise):
        return Sign("tiny", numbers)
    return None


def _norm_falls_with_rate(log: LogFeatures, bound: float) -> bool:
    """Whether the gradient norm was above a bound while the rate was above half of its peak, and
    the rate decayed: the norm of a gentle fine-tuning shrinks with it."""
    rate, norms = log.rate, log.gradient.series
    if log.schedule.is_kept is not False:
        return False
    there = np.interp(norms.steps, rate.series.steps, rate.values) > 0.5 * rate.values.max()
    late = norms.values[there][-max(5, len(norms) // 10) :]
    return len(late) > 0 and float(np.median(late)) > bound


def _weights_rest(log: LogFeatures) -> bool:
    """Whether the weights, and the evaluations, have hardly moved since the first tenth."""
    later, values = log.weights.norms[len(log.weights.norms) // 10 :], log.validation.values
    if len(later) < 5 or len(values) < 5:
        return False
    stands = float(np.ptp(values[1:])) < 0.15 * abs(float(values[0]))
    return stands and float(np.ptp(later)) < limits.MAX_MOTION_AT_REST * float(later[0])


def _levels_of_parts(log: LogFeatures) -> dict[str, object] | None:
    """Median gradient norm of each part of the model, where one part's is next to nothing."""
    parts = log.recording.family("grad_norm")
    norms = {name: series.finite.values for name, series in parts.items()}
    levels = {name: float(np.median(values)) for name, values in norms.items() if len(values)}
    if len(levels) < 2 or not min(levels.values()) < limits.MAX_NORM_LOST * max(levels.values()):
        return None
    least, most = min(levels, key=levels.__getitem__), max(levels, key=levels.__getitem__)
    named: dict[str, object] = {"smallest_at": least, "smallest": levels[least]}
    named |= {"largest_at": most, "largest": levels[most]}
    return named | {f"grad_norm/{name}": level for name, level in levels.items()}


# -- nothing moves, everything adds up, one tower spikes -------------------------------------------


@cause(own_page("weights-do-not-move"), needs=(LOSS,), min_losses=limits.MIN_ROWS, only_finite=True)
def weights_do_not_move(log: LogFeatures) -> Sign | None:
    """The weights do not change."""
    norms, losses = log.weights.norms, log.validation.values
    if len(norms) >= 3 and (norms != norms[0]).any():
        return None
    known = len(norms) >= 3
    evaluated = log.progress.is_flat_within_noise and len(losses) >= 3
    same = evaluated and not (losses != losses[0]).any()
    zeros = log.gradients.share_of_zeros
    none_arrives = zeros is not None and zeros > 0.95
    if not (known or same or none_arrives):
        return None
    if log.gradients.is_tiny or log.schedule.sum_is_below(limits.MAX_SUM_OF_NO_RATES):
        return None
    return sign(
        "same",
        weight_norm=float(norms[0]) if known else None,
        num_norms=len(norms),
        validation_loss=float(losses[0]) if same else None,
        num_evaluations=len(losses),
        share_of_zero_gradients=zeros if none_arrives else None,
    )


@cause(own_page("gradients-not-cleared"), needs=(GRADIENT,))
def gradients_not_cleared(log: LogFeatures) -> Sign | None:
    """Gradients accumulate over updates: zero_grad is missing."""
    gradient, values, steps = log.gradient, log.gradient.values, log.gradient.series.steps
    if len(values) < 20 or values[0] <= 0:
        return None
    first, highest = float(values[0]), float(gradient.smooth.max())
    change = float(np.median((np.abs(np.diff(values)) / np.maximum(values[:-1], 1e-30))[3:]))
    growth, early = highest / first, float(values[4]) / first
    sums = values[1:5] / (first * np.arange(2, 6))
    each = steps[0] <= 1 and bool((np.diff(steps[:5]) == 1).all())
    adds_up = each and bool((np.abs(sums - 1) < 0.25).all())
    # Where the log begins later, its first norm is a sum already.
    least = limits.MIN_GROWTH_OF_SUM / (1 if steps[0] <= 1 else 2)
    rises = growth > 2 * limits.MIN_GROWTH_OF_SUM
    rises = rises and linearity(ranks(values)) > limits.MIN_LINEARITY_OF_SUM
    if growth < least or not (early > 1.8 or rises) or not (adds_up or change < 0.08):
        return None
    return sign(
        "adds-up",
        first_grad_norm=first,
        first_step=gradient.step(0),
        fifth_grad_norm=float(values[4]),
        fifth_step=gradient.step(4),
        highest_grad_norm=highest,
        median_change=change,
    )


@cause(own_page("one-tower-spikes"), needs=(GRADIENT_PER_TOWER,))
def one_tower_spikes(log: LogFeatures) -> Sign | None:
    """The gradients of one tower spike while those of the others do not."""
    towers = list(log.recording.family("grad_norm"))
    steps, *columns = log.recording.aligned(*(f"grad_norm/{name}" for name in towers))
    table = np.array(columns)
    sound = np.isfinite(table).all(axis=0)
    steps, table = steps[sound], table[:, sound]
    if len(steps) <= 10:
        return None
    counts = [_spikes_alone(table, tower) for tower in range(len(towers))]
    tower = max(range(len(towers)), key=lambda one: len(counts[one]))
    found, norms = counts[tower], table[tower]
    others = max(len(rows) for one, rows in enumerate(counts) if one != tower)
    if len(found) < 3 or len(found) < limits.MIN_SPIKES_PER_OTHER_TOWER * others:
        return None
    worst = max(found, key=lambda position: float(norms[position]))
    return sign(
        "spikes-alone",
        tower=towers[tower],
        factor=float(limits.MIN_GRADIENT_SPIKE),
        spikes=len(found),
        spikes_of_others=others,
        median_grad_norm=float(np.median(norms)),
        first_step=int(steps[found[0]]),
        worst_grad_norm=float(norms[worst]),
        worst_step=int(steps[worst]),
    )


def _spikes_alone(table: Floats, tower: int) -> list[int]:
    """Rows in which a tower is far above its own past, and far above the others for once."""
    norms = table[tower]
    share = norms / np.maximum(np.median(np.delete(table, tower, axis=0), axis=0), 1e-30)
    with np.errstate(invalid="ignore"):
        found = norms > limits.MIN_GRADIENT_SPIKE * median_before(norms)
        found &= share > limits.MIN_SPIKE_BEYOND_EXPECTED * median_before(share)
    found[:5] = False
    return [int(position) for position in np.flatnonzero(found)]
