"""Causes in the data and their labels: bad batches, wrong labels, order, batch sizes, leaks."""

from __future__ import annotations

import itertools
import math

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.causes.base import Sign, cause, sign
from surefoot.diagnosis.causes.page import own_page
from surefoot.diagnosis.log_features.log import LogFeatures
from surefoot.diagnosis.needs import BATCH_ITEMS, EPOCH, LOSS
from surefoot.diagnosis.recording import Floats
from surefoot.diagnosis.robust import ranks, running_median, spread

# -- single batches --------------------------------------------------------------------------------


@cause(own_page("bad-batch"), needs=(LOSS,), min_losses=30)
def bad_batch(log: LogFeatures) -> Sign | None:
    """The loss of single batches is far above that of all others."""
    loss, found = log.loss, _single_spikes(log)
    if not found:
        return _bad_stretch(log)
    if len(found) > max(4, 0.02 * len(loss)):
        return None
    worst = max(found, key=lambda position: loss.values[position] - loss.smooth[position])
    ids = [log.recording.sample_ids.get(int(loss.series.rows[p]), ()) for p in found]
    return sign(
        "one" if len(found) == 1 else "several",
        batches=len(found),
        steps=[loss.step(position) for position in found],
        losses=[float(loss.values[position]) for position in found],
        worst_step=loss.step(worst),
        worst_loss=float(loss.values[worst]),
        usual=float(loss.smooth[worst]),
        samples=[list(samples[:16]) for samples in ids],
    )


def _bad_stretch(log: LogFeatures) -> Sign | None:
    """One stretch of rows whose level is far above those before and after it."""
    loss = log.loss
    few, longest = limits.LASTING_ROWS, len(loss) // 8
    if longest <= 2 * few:
        return None
    level, around = running_median(loss.values, few), running_median(loss.values, 3 * longest | 1)
    gained = max(loss.start - loss.lowest, 0.05 * abs(loss.start))
    need = max(limits.MIN_SPIKE_SIGMAS * loss.noise, limits.MIN_SPIKE_PER_GAIN * gained)
    high = np.flatnonzero(level - around > need)
    high = high[high > len(loss) // 5]  # Before, a curve that falls is above what follows.
    if not few <= len(high) <= longest or high[-1] - high[0] >= len(high):
        return None
    before, after = (
        loss.values[high[0] - longest : high[0]],
        loss.values[high[-1] + few :][:longest],
    )
    if len(after) < longest or np.median(after) - np.median(before) > need / 4:
        return None
    worst = int(high[loss.values[high].argmax()])
    return sign(
        "stretch",
        batches=len(high),
        first_step=loss.step(int(high[0])),
        final_step=loss.step(int(high[-1])),
        worst_loss=float(loss.values[worst]),
        usual=float(around[worst]),
    )


def _single_spikes(log: LogFeatures) -> list[int]:
    """Positions of spikes of one or two rows, after the beginning."""
    loss, norms = log.loss, log.recording["grad_norm"].finite
    gained = max(loss.start - loss.lowest, 0.05 * abs(loss.start))
    left = loss.values - loss.smooth
    sigmas = limits.MIN_SPIKE_SIGMAS
    need = max(sigmas * loss.noise, limits.MIN_SPIKE_PER_GAIN * gained, _reach_of_tail(left))
    high = np.flatnonzero(left > need)
    found = []
    for position in high[high >= max(8, len(loss) // 20)].tolist():
        places = np.arange(max(0, position - 15), min(len(left), position + 16))
        around = left[np.setdiff1d(places, high)]  # Where two are broken, the other is no measure.
        if left[position] < sigmas * spread(around) or left[position] < 2.5 * around.max():
            continue
        row = int(loss.series.rows[position])
        before = norms.values[norms.rows < row][-31:]
        norm = log.recording.value_in_row("grad_norm", row)
        if norm is None or not len(before) or norm > 1.5 * float(np.median(before)):
            found.append(position)
    return found


def _reach_of_tail(left: Floats) -> float:
    """How far an ordinary batch may stand above the level: beyond the 97.5th percentile, the
    deviations of batches fade as fast as they do on the way there from the 90th."""
    later = left[max(8, len(left) // 20) :]
    usual, high = (float(value) for value in np.percentile(later, (90, 97.5)))
    decay, beyond = (high - usual) / np.log(4), np.log(max(1.0, 0.025 * len(later)))
    return float(high + decay * (beyond + limits.MIN_DECAYS_BEYOND_TAIL))


# -- labels ----------------------------------------------------------------------------------------


@cause(own_page("labels-unrelated"), needs=(LOSS,), min_losses=20, only_finite=True)
def labels_unrelated(log: LogFeatures) -> Sign | None:
    """The labels do not match the inputs: the loss stays at that of a guess."""
    loss, first, motion = log.loss, log.first_loss, log.weights.motion
    by_frequency = _settles_at_frequencies(log) or _answers_the_same(log)
    settles = by_frequency or _settles_at_guess(log) or _guesses_on(log)
    if not log.progress.is_flat_within_noise and not settles:
        return None
    if log.classes.ends_above_guess and not by_frequency:
        return None
    if float(loss.values.min()) < 0 or (not settles and _learns(log)):
        return None
    if log.start.is_vague and not _validation_stays(log):
        return None
    if motion is None and log.classes.of_first_loss is None and not _looks_like_guess(log):
        return None
    at_guess = log.classes.ends_at_guess(limits.MAX_LOSS_OFF_GUESS)
    least = limits.MIN_MOTION_AT_GUESS if at_guess else limits.MIN_MOTION_OF_LEARNING
    if motion is not None and motion < least:
        return None
    if log.schedule.sum_is_below(limits.MAX_SUM_OF_LOW_RATES):
        return None
    if log.weights.grew_by_more_than(limits.MIN_RUNAWAY_GROWTH):
        return None
    if loss.end > first + max(0.02 * abs(first), 3 * loss.standard_error()) and not settles:
        return None
    return sign("stays" if motion is None else "stays-though-weights-moved")


def _looks_like_guess(log: LogFeatures) -> bool:
    """Whether the log holds the start, and batches hardly differ: a guess has about the same loss
    on any sample, a trained model, such as one that is fine-tuned, has not."""
    return log.start.is_logged and log.loss.noise < limits.MAX_NOISE_OF_GUESS * log.loss.end


def _learns(log: LogFeatures) -> bool:
    """Whether the mean loss comes down, though noise hides it from medians; or the validation loss,
    which has none, still falls in the second half."""
    loss, values = log.loss, log.validation.values
    gained = float(loss.part(0, 0.1).mean()) - float(loss.part(0.5, 1).mean())
    certain = log.progress.trend_in_standard_errors < -limits.MIN_TREND_OF_LEARNING
    if certain and gained > 2 * limits.MAX_FLAT_DROP * abs(log.first_loss):
        return True
    if len(values) < 5:
        return False
    if float(np.median(values[-3:])) < (1 - limits.MIN_VALIDATION_FALL) * float(values[0]):
        return True
    if log.evaluations.trend > -0.9:
        return False
    half, least = len(values) // 2, limits.MIN_STEADY_VALIDATION_FALL
    first, second = float(values[0] - values[half]), float(values[half] - values[-1])
    fell = (first + second) / abs(float(values[0]) or 1.0)
    return fell > 10 * least or (fell > least and second > 0.25 * first)


def _validation_stays(log: LogFeatures) -> bool:
    values = log.validation.values
    most = 2 * limits.MAX_FLAT_DROP
    return len(values) > 3 and float(np.ptp(values)) < most * abs(float(values[0]))


def _settles_at_frequencies(log: LogFeatures) -> bool:
    """Whether a loss over a vocabulary came down early and neither it nor a weight has moved since:
    how often each token occurs is soon learnt, and who learns more moves weights."""
    loss, norms, rate = log.loss, log.weights.norms, log.rate
    if log.first_loss < math.log(limits.MIN_CLASSES_OF_VOCABULARY):
        return False
    if loss.end <= 0.5 * log.first_loss or loss.noise > limits.MAX_NOISE_OF_MANY_TOKENS * loss.end:
        return False
    later = norms[len(norms) // 4 :]
    growth = 1 + limits.MAX_MOTION_AT_REST  # Weight decay may shrink them.
    rests = len(later) > 5 and float(later.max()) < growth * float(later[0])
    if len(rate) and rate.part(0, 0.25).sum() >= 0.5 * rate.values.sum():
        return False
    if not rests and (len(norms) or len(log.validation)):
        return False
    stands = abs(loss.level(0.25, 0.5) - loss.level(0.75, 1)) < 3 * loss.standard_error(0.25)
    return stands and abs(log.progress.trend_in_standard_errors) < limits.MIN_TREND_OF_LEARNING


def _guesses_on(log: LogFeatures) -> bool:
    """Whether the loss stands for most of the run, and the accuracy is what a guess with that loss
    has, at the end as in the beginning."""
    loss, accuracies = log.loss, log.classes.accuracies
    if len(accuracies) < 4 or not 0 < loss.end < 3:
        return False
    stands = abs(loss.level(0.3, 0.6) / loss.end - 1) < limits.MAX_LOSS_OFF_GUESS
    later = float(accuracies[len(accuracies) // 2 :].mean())
    flat = abs(log.progress.drop) < 2 * limits.MAX_FLAT_DROP
    return stands and flat and later < 1.4 * math.exp(-loss.end)


def _answers_the_same(log: LogFeatures) -> bool:
    """Whether the accuracy is the same from the first evaluation on, while the loss has come down a
    little and stands: the share of the most frequent class."""
    loss, accuracies = log.loss, log.classes.accuracies
    if len(accuracies) < 4 or float(np.ptp(accuracies)) > limits.MAX_SPREAD_OF_SAME_ACCURACY:
        return False
    stands = abs(loss.level(0.4, 0.7) - loss.level(0.8, 1)) < 3 * loss.standard_error(0.2)
    high = bool(accuracies[-1] >= limits.MAX_ACCURACY_OF_ONE_CLASS)
    return stands and not high and loss.end > 0.5 * log.first_loss


def _settles_at_guess(log: LogFeatures) -> bool:
    """Whether the loss, from wherever it began, has come to log(C) and is there for most of it."""
    guess, loss, off = log.classes.guess_loss, log.loss, limits.MAX_LOSS_OFF_GUESS
    if guess is None:
        return False
    near = all(-off < level / guess - 1 < 2 * off for level in (loss.level(0.3, 0.6), loss.end))
    return near and loss.lowest > (1 - off) * guess


# -- order and size of the batches -----------------------------------------------------------------


@cause(own_page("data-not-shuffled"), needs=(LOSS, EPOCH))
def data_not_shuffled(log: LogFeatures) -> Sign | None:
    """The loss repeats a pattern each epoch: the data come in the same, sorted order."""
    _, epochs, values = log.recording.aligned("epoch", "loss")
    if not np.isfinite(epochs).all():
        return None
    whole = np.floor(epochs)
    starts = np.flatnonzero(np.diff(whole, prepend=whole[:1] - 1) > 0)
    if len(starts) < 3:
        return None
    period = int(np.median(np.diff(starts)))
    if period < 6:
        return None
    degree = 3 if period >= limits.MIN_ROWS_FOR_CUBIC else 1
    complete = [values[s : s + period] for s in starts.tolist() if s + period <= len(values)]
    folds = [_without_trend(fold, degree) for fold in complete if np.isfinite(fold).all()]
    # A pattern of the data is about as large in each; what is left of a curve's bends is not. Of
    # many epochs, the first ones may be a transient.
    spreads = [float(fold.std()) for fold in folds]
    usual = float(np.median(spreads)) if len(folds) >= 6 else max(spreads, default=0.0)
    folds = [fold for fold in folds if fold.std() > limits.MIN_SPREAD_OF_FOLD * usual]
    if len(folds) < 2:
        return None
    pairs = [float(np.corrcoef(a, b)[0, 1]) for a, b in itertools.pairwise(folds)]
    agreement, freedom = float(np.median(pairs)), period - degree - 1
    # Two parts of a learning curve may correlate.
    alike = limits.MIN_AGREEMENT if len(pairs) > 1 else limits.MIN_AGREEMENT_OF_ONE_PAIR
    if agreement < max(alike, limits.SURE_ERRORS / (freedom * len(pairs)) ** 0.5):
        return None
    profile = np.median(np.stack(folds), axis=0)
    swing, left = float(np.ptp(profile)), spread((np.stack(folds) - profile).ravel())
    if swing < max(0.005 * abs(log.first_loss), limits.MIN_SWING_PER_RESIDUAL * left):
        return None
    return sign(
        "same-pattern", epochs=len(folds), period_rows=period, agreement=agreement, swing=swing
    )


def _without_trend(values: Floats, degree: int) -> Floats:
    """What is left of one epoch without the trend of a curve that falls."""
    places = np.linspace(-1, 1, len(values))
    left: Floats = values - np.polyval(np.polyfit(places, values, degree), places)
    return left


@cause(own_page("uneven-batches"), needs=(LOSS, BATCH_ITEMS))
def uneven_batches(log: LogFeatures) -> Sign | None:
    """Batch sizes differ widely, and the loss varies with them."""
    loss, items = log.recording.aligned("loss", "weight")[1:]
    sound = np.isfinite(loss) & np.isfinite(items) & (items > 0)
    loss, items = loss[sound], items[sound]
    if len(loss) < 30:
        return None
    low, high = (float(v) for v in np.percentile(items, (10, 90)))
    level = running_median(loss, max(5, len(loss) // 15) | 1)
    if (short := _short_ones_are_sums(loss, items, level)) is not None:
        return short
    follows = float(np.corrcoef(ranks(loss - level), ranks(items))[0, 1])
    if high >= 2 * low and follows > limits.MIN_CORRELATION_OF_SUM:
        return sign("sums", items_p10=low, items_p90=high, rank_correlation=follows)
    if high < limits.MIN_RATIO_OF_UNEVEN_ITEMS * low:
        return None
    # On the scale of the time: late in a run all is smaller.
    off = np.abs(loss - level)
    off = off / np.maximum(running_median(off, max(31, len(off) // 5) | 1), 1e-30)
    is_small = items < float(np.sqrt(low * high))
    small, large = off[is_small], off[~is_small]
    if len(small) < limits.MIN_SHARE_OF_SMALL_BATCHES * len(off):
        return None
    if len(large) < max(5, limits.MIN_SHARE_OF_LARGE_BATCHES * len(off)):
        return None
    # Half of the deviations, three quarters and nine tenths are below these.
    parts = [np.maximum(np.percentile(side, (50, 75, 90)), 1e-30) for side in (small, large)]
    ratio = float(np.exp(np.mean(np.log(parts[0] / parts[1]))))
    if 1 / limits.MIN_RATIO_OF_DEVIATIONS < ratio < limits.MIN_RATIO_OF_DEVIATIONS:
        return None
    return sign("swings", items_p10=low, items_p90=high, deviation_ratio=ratio)


def _short_ones_are_sums(loss: Floats, items: Floats, level: Floats) -> Sign | None:
    """Of batches of one size but for the last ones of epochs: whether the loss of these is as much
    smaller as they are."""
    usual, fewest = float(np.median(items)), limits.MIN_SHORT_BATCHES
    short = items < usual / 1.3
    num_short = int(short.sum())
    short &= level > 0
    if (items == usual).mean() < 1 - limits.MIN_SHARE_OF_SMALL_BATCHES or short.sum() < fewest:
        return None
    ratio, expected = loss[short] / level[short], items[short] / usual
    # Nearer to what a sum has than to what a mean has.
    if float((ratio < np.sqrt(expected)).mean()) < 0.9:
        return None
    return sign(
        "short-ones-are-sums",
        items=usual,
        short_batches=num_short,
        share_of_level=float(np.median(ratio)),
        share_of_items=float(np.median(expected)),
    )


# -- leaks -----------------------------------------------------------------------------------------


@cause(own_page("target-leaks"), needs=(LOSS,), min_losses=limits.MIN_ROWS)
def target_leaks(log: LogFeatures) -> Sign | None:
    """The target can be read from the input: the loss falls to nearly zero at once."""
    if log.first_loss <= 0:
        return None
    copied = _is_copied(log)
    if not copied and not _is_there_at_once(log):
        return None
    share = limits.MAX_LEARNT_SHARE if copied else limits.MAX_SHARE_IN_HALF_AN_EPOCH
    below = np.flatnonzero(log.loss.smooth < share * log.first_loss)
    step = log.loss.step(int(below[0]) if len(below) else -1)
    return sign("copied" if copied else "at-once", share=float(share), step=step)


def _is_copied(log: LogFeatures) -> bool:
    """Whether a loss over a vocabulary is at nearly nothing, and not memorized."""
    first, classes = log.first_loss, log.classes
    if first > math.log(limits.MAX_CLASSES):
        return False  # No guess: weights out of scale, of whose first loss anything is little.
    if not classes.is_language and first < math.log(limits.MIN_CLASSES_TO_LEAK):
        return False
    evaluated = len(log.validation) > 0
    little = max(log.loss.end, log.evaluations.last or -math.inf) < limits.MAX_LEARNT_SHARE * first
    epochs = log.recording["epoch"].finite.values
    all_new = len(epochs) > 0 and float(epochs.max()) <= 1
    if _trains_alone(log) or (all_new and _falls_on_new_samples(log)):
        return True
    if classes.known is not None and classes.known < limits.MIN_SYMBOLS_OF_LANGUAGE:
        return False  # Sorting, copying, counting: tasks without noise, which can be learnt.
    if not classes.is_language:
        return all_new and evaluated and little
    # What was seen often may be memorized, and nothing says that it is not.
    often = len(epochs) > 0 and float(epochs.max()) > 2 and not evaluated
    return little and not often


def _is_there_at_once(log: LogFeatures) -> bool:
    """Whether the train loss is at nothing before half of the samples were seen once, while the
    validation loss stays at that of a guess or worse. Where that falls, too, the task may be one
    that has no noise, such as copying."""
    loss, losses, epochs = log.loss, log.validation.values, log.recording["epoch"].finite
    below = np.flatnonzero(loss.smooth < limits.MAX_SHARE_IN_HALF_AN_EPOCH * log.first_loss)
    if len(losses) < 2 or not len(below) or below[0] > limits.MAX_SHARE_OF_RUN_TO_LEAK * len(loss):
        return False
    if not len(epochs) or np.interp(loss.step(int(below[0])), epochs.steps, epochs.values) > 0.5:
        return False
    return float(losses.min()) > limits.MIN_SHARE_OF_GUESS * log.first_loss


def _falls_on_new_samples(log: LogFeatures) -> bool:
    """Whether the train loss is at nearly nothing, and the validation loss is high: of samples that
    the run had never seen before, none is memorized."""
    values, first = log.validation.values, log.first_loss
    high = len(values) > 1 and float(np.median(values[-2:])) > first / 2
    return high and log.loss.end < limits.MAX_LEARNT_SHARE_OF_NEW_SAMPLES * first


def _trains_alone(log: LogFeatures) -> bool:
    """Whether the train loss is at nearly nothing for a quarter of the run, and the validation
    loss, far above it, goes on falling: what is memorized makes it rise."""
    loss, values = log.loss, log.validation.values
    if len(values) < 4 or loss.level(0.75, 0.85) > limits.MAX_LEARNT_SHARE * log.first_loss:
        return False
    late, early = float(np.median(values[-2:])), float(np.median(values[: len(values) // 2 + 1]))
    return late < 1.05 * float(values.min()) and late < early and late > 5 * loss.end
