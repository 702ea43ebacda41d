"""Causes between training and validation, and in the fit of the loss function to the outputs."""

from __future__ import annotations

import math

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.causes.base import Sign, cause, sign
from surefoot.diagnosis.causes.page import own_page
from surefoot.diagnosis.log_features.classes import exp_capped
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.needs import LOSS, VALIDATION_LOSS
from surefoot.diagnosis.robust import linearity, median_curvature

# -- overfitting, underfitting ---------------------------------------------------------------------


@cause(own_page("overfitting"), needs=(LOSS, VALIDATION_LOSS), min_losses=4)
def overfitting(log: LogFeatures) -> Sign | None:
    """The validation loss has a minimum and rises while the training loss keeps falling."""
    loss, validation, values = log.loss, log.validation, log.validation.values
    if len(values) < 4 or log.progress.drop < 0.1:
        return None
    best_at, best, last = int(values.argmin()), float(values.min()), float(values[-2:].mean())
    after, rise = values[best_at + 1 :], last - best
    if len(after) < 2 or not log.evaluations.followed_until_best:
        return None
    gained = max(float(values[0]), log.first_loss) - best
    steadily = linearity(after) > limits.MIN_LINEARITY_OF_RISE
    far = rise > limits.MIN_RISE_PER_GAIN * gained
    far = far or (steadily and rise > limits.MIN_STEADY_RISE_PER_BEST * best)
    # Where the training data are memorized, the turn is clear though evaluations are noisy.
    fitted = loss.end < limits.MAX_FITTED_LOSS_PER_BEST * best
    if gained <= 0 or not far or rise <= (2 if fitted else 4) * median_curvature(values):
        return None
    turn = validation.step(best_at)
    before = loss.values[loss.series.steps <= turn][-max(5, len(loss) // 20) :]
    if not len(before) or loss.end >= float(before.mean()) - loss.noise:
        return None
    return sign(
        "turned",
        best_validation_loss=best,
        best_step=turn,
        last_validation_loss=last,
        final_step=validation.step(-1),
        train_loss_then=float(before.mean()),
        train_loss_now=loss.end,
    )


@cause(
    own_page("underfitting"),
    needs=(LOSS, VALIDATION_LOSS),
    min_losses=limits.MIN_ROWS,
    only_finite=True,
)
def underfitting(log: LogFeatures) -> Sign | None:
    """Training and validation loss stall together, early and high."""
    loss, values, first, found = log.loss, log.validation.values, log.first_loss, log.evaluations
    if len(values) < 5 or loss.end < limits.MIN_SHARE_LEFT * first:
        return None
    if log.progress.drop < limits.MIN_DROP_TO_UNDERFIT:
        return None
    many = math.log(limits.MAX_FEW_CLASSES) < first
    good = limits.MIN_GOOD_ACCURACY_OF_MANY if many else limits.MIN_GOOD_ACCURACY
    # Of right answers so many that wrong labels may be all that is left.
    skilled = log.classes.skill is not None and log.classes.skill > limits.MAX_SKILL_TO_UNDERFIT
    if skilled or (log.classes.accuracy or 0.0) > good:
        return None
    drop, half, close = first - loss.end, loss.level(0.45, 0.6), limits.MAX_GAP_PER_DROP
    last, fall = float(np.median(values[-2:])), half - loss.level(0.85, 1.0)
    most = limits.MAX_LATE_GAIN / (3 if log.schedule.is_kept else 1)
    if _ends_near_guess(log):
        most = limits.MAX_LATE_GAIN_NEAR_GUESS
    stalled = -close < found.gain_in_second_half < most
    if not stalled or fall / drop >= max(2 * limits.MAX_LATE_GAIN, most):
        return None
    by_gain = found.curvature_of_gain > limits.MAX_CURVATURE_OF_STALL
    by_level = found.curvature_of_level > limits.MAX_CURVATURE_OF_STALL / 2
    if not -2 * close < (last - loss.end) / drop < close or (by_gain and by_level):
        return None
    return sign(
        "stalls",
        train_at_half=half,
        train_at_end=loss.end,
        validation_at_half=float(np.median(log.validation.part(0.4, 0.6))),
        validation_at_end=last,
    )


def _ends_near_guess(log: LogFeatures) -> bool:
    """Whether a loss that began at that of a guess among few classes ends not far below it: what
    the decay of the rate still brings does not make it a good one."""
    first, known = log.first_loss, log.classes
    classes = known.known or exp_capped(max(first, float(log.loss.values[0])))
    few = 2.5 < classes < limits.MAX_FEW_CLASSES and not known.is_language
    return (
        few
        and first < 1.3 * math.log(classes)
        and log.loss.end > limits.MIN_SHARE_LEFT_OF_FEW_CLASSES * first
    )


# -- a validation that measures something else -----------------------------------------------------


@cause(own_page("validation-differs"), needs=(LOSS, VALIDATION_LOSS), min_losses=limits.MIN_ROWS)
def validation_differs(log: LogFeatures) -> Sign | None:
    """The validation loss does not follow the training loss from the first evaluation on."""
    loss, values, steps = log.loss, log.validation.values, log.validation.series.steps
    first, most = log.first_loss, limits.MAX_SHARE_FOLLOWED
    learnt = float(loss.part(0, 0.1).mean()) - float(loss.part(0.5, 1).mean())
    if len(values) < 3 or log.progress.drop < 0.2 or log.progress.is_flat_within_noise:
        return None
    # A run that starts well and stays there gives a validation loss nothing to follow.
    if learnt < limits.MIN_MEAN_DROP_TO_FOLLOW * abs(first):
        return None
    way = first - loss.lowest
    train = np.array([log.evaluations.training_loss_at(step) for step in steps])
    far = np.flatnonzero(first - train > 0.6 * way)
    if not len(far):
        return None
    at = int(far[0])
    gone, best = first - float(train[at]), float(values[: at + 1].min())
    error = loss.error_of_median(max(5, len(loss) // 20))
    if gone < 3 * float(np.hypot(log.start.standard_error, error)):
        return None
    followed = (first - best) / max(gone, 1e-30)
    # A set that is harder as a whole: its loss falls as the train loss does, from higher up.
    parallel = float(values[0] - best) / max(float(train[0] - train[at]), most * way)
    near, steady = float(values[0]) < 1.5 * abs(first), log.evaluations.trend < -0.9
    if steady and near:
        parallel = max(parallel, float(values[0] - values.min()) / way)
    if max(followed, parallel if steady or near else 0.0) > most:
        return None
    if (first - float(values.min())) / way > 2 * most:
        return None
    # Who has seen the samples often may have memorized them: then it can be overfitting.
    rises = float(np.median(values[-3:])) - float(values.min())
    by_heart = rises > limits.MIN_RISE_AFTER_BEST * abs(first)
    by_heart = by_heart and log.evaluations.followed_until_best
    return sign(
        "follows-little-and-rises" if by_heart else "does-not-follow",
        step=int(steps[at]),
        train_loss=float(train[at]),
        validation_loss=float(values[at]),
        best_validation_loss=float(values.min()),
        share_followed=followed,
    )


# -- a loss that does not fit the outputs ----------------------------------------------------------


@cause(own_page("wrong-loss"), needs=(LOSS,), min_losses=limits.MIN_ROWS, only_finite=True)
def wrong_loss(log: LogFeatures) -> Sign | None:
    """The loss function does not fit the model's outputs."""
    return _falls_below_zero(log) if log.loss.end < 0 else _stands_after_softmax(log)


def _falls_below_zero(log: LogFeatures) -> Sign | None:
    loss, parts = log.loss, log.progress.per_rate(5)
    best, last = float(parts.max()), float(parts[-1])
    if loss.end < -1 and last > 0.7 * best > 0:
        return sign("falls-below-zero", last_fifth=last, best_fifth=best)
    if float(loss.values.min()) >= -1 and float(loss.values.max()) <= 0:
        return sign("minus-probability")
    return _stands_after_softmax(log)


def _stands_after_softmax(log: LogFeatures) -> Sign | None:
    """Cross-entropy of C probabilities in place of scores has the floor log(e + C - 1) - 1."""
    loss, known, rate = log.loss, log.classes.known, log.rate
    accuracy, losses = log.classes.accuracy, log.validation.values
    if not log.start.is_logged or log.first_loss <= 0:
        return None
    # The very first rows: at a good rate a loss has left its start after a few.
    initial = float(np.median(loss.values[:5]))
    still = float(np.ptp(loss.values[:3])) < limits.MAX_SPREAD_OF_START * initial
    if known is None and loss.series.steps[0] > 1 and not still:
        return None
    classes = known or round(exp_capped(max(initial, 0.0)))
    stated = accuracy is not None or known is not None
    if classes < 2 or (classes > limits.MAX_CLASSES_FROM_LOSS and not stated):
        return None
    floor = math.log(math.e + classes - 1) - 1
    at_floor = max(abs(loss.end - floor), loss.noise) < limits.MAX_OFF_FLOOR * floor
    sure = known is not None and (accuracy is not None or at_floor)
    if abs(math.log(classes) - initial) > 0.02 * initial and not sure:
        return None
    if float(loss.smooth.min()) < floor - 0.01:
        return None
    if accuracy is not None and len(losses) and float(losses[-1]) < 0.5 * floor:
        # The evaluation has no softmax too many: then the accuracy foretells the training loss.
        if abs(loss.end - (floor + 1 - accuracy)) > limits.MAX_OFF_FLOOR_OF_ACCURACY * floor:
            return None
        return sign("evaluated-otherwise", classes=classes, floor=floor)
    if min(losses.tolist(), default=math.inf) < floor - 0.01:
        return None
    kept = not len(rate) or float(np.median(rate.part(0.4, 0.6))) > 0.2 * float(rate.values.max())
    gained = log.first_loss - loss.end
    if not kept or loss.level(0.5, 0.7) - loss.end >= 0.15 * gained:
        return None
    if accuracy is not None:
        if not _is_high_for_accuracy(float(losses[-1]), accuracy, classes):
            return None
        return sign("high-for-its-accuracy", classes=classes, floor=floor)
    first, second = log.progress.per_rate(2)
    near = (loss.end - floor) / max(log.first_loss - floor, 1e-30) <= limits.MAX_WAY_TO_FLOOR
    came_down = at_floor or log.progress.drop > 0.1
    # Where every answer is as sure as it can be, batches hardly differ; at the noise of a task
    # that happens to lie there they do.
    alike = loss.noise < limits.MAX_NOISE_AT_FLOOR * floor
    if second > 0.25 * (first + second) or not (near and alike and came_down):
        return None
    return sign("at-the-floor", classes=classes, floor=floor)


def _is_high_for_accuracy(loss: float, accuracy: float, classes: int) -> bool:
    """Whether a loss is what it is after a softmax: about log(e + C - 1) minus the probability of
    the label, which is the accuracy, or less where the model is not sure; and more than an honest
    model of this accuracy has, its errors spread over the other classes."""
    expected = math.log(math.e + classes - 1) - accuracy
    wrong = max(1 - accuracy, 1e-9)
    honest = -accuracy * math.log(max(accuracy, 1e-9)) - wrong * math.log(wrong / (classes - 1))
    return loss >= 1.2 * honest and -0.1 < loss - expected < 0.25
