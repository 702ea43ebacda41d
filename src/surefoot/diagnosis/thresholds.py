"""The one table of thresholds: each with the quantity that it bounds, its unit, and why it is so.

All but those that a formula gives were calibrated on runs of small models: those of
`tests/diagnosis` (an MLP, a CNN and a GPT, each with every fault) and the further sets that
docs/doctor.md lists, whose first scores were taken before anything was moved. The held-out runs of
`tests/diagnosis/held_out` had no part in it. "Healthy runs: ..." gives the range of the quantity
over the 72 healthy runs of `tests/diagnosis/healthy_runs.py`. A threshold is relative, never in the
units of a loss: MAX_ bounds what is harmless or counts as small, MIN_ what counts as a sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class Threshold(float):
    """A bound; a float with its unit and its reason."""

    unit: str
    why: str

    def __new__(cls, value: float, unit: str, why: str) -> Self:
        made = super().__new__(cls, value)
        made.unit, made.why = unit, why
        return made


class CountThreshold(int):
    """A bound that is counted, such as one in rows."""

    unit: str
    why: str

    def __new__(cls, value: int, unit: str, why: str) -> Self:
        made = super().__new__(cls, value)
        made.unit, made.why = unit, why
        return made


def _in(unit: str) -> Callable[[float, str], Threshold]:
    return lambda value, why: Threshold(value, unit, why)


def _counted(unit: str) -> Callable[[int, str], CountThreshold]:
    return lambda value, why: CountThreshold(value, unit, why)


rows, updates, classes = _counted("rows"), _counted("updates"), _counted("classes")
times_counted = _counted("times")
of_first_loss = _in("of the first loss")
of_gain = _in("of what the loss came down in all")
of_level = _in("of the level of the same series")
of_guess = _in("of log(C), the loss of a guess among C classes")
of_weights = _in("of the first weight norm")
of_run, of_peak_rate = _in("of the run"), _in("of the peak rate")
of_updates, of_time = _in("of the updates"), _in("of the time")
ratio, share, sigmas = _in("ratio"), _in("share"), _in("standard deviations")
accuracy, correlation = _in("accuracy, 0 to 1"), _in("correlation, -1 to 1")
rate_sum = _in("sum of the rates of all updates")

# -- several causes --------------------------------------------------------------------------------

MIN_ROWS = rows(8, "fewer have no shape")
LASTING_ROWS = rows(
    5, "a median of so many is moved by weights moved too far, not by one hard batch"
)
MAX_FLAT_DROP = of_first_loss(0.045, "a loss that came down by less has not moved")
LOW_LOSS = of_first_loss(0.3, "below it single batches differ by factors")
ROWS_AFTER_THE_FIRST = rows(
    10, "among which the first is an extreme where the weights left at once"
)
MAX_FIRST_LOSS_ERROR = of_first_loss(0.1, "a start known no better tells nothing")
MIN_RISE_ABOVE_FIRST = of_first_loss(0.15, "no healthy run has a level above it")
SURE_ERRORS = _in("standard errors")(4.0, "one chance in 30,000 for a normal error")
EARLY_SHARE_OF_RUN = of_run(0.05, "a first rate that is too high throws the weights within it")
MAX_LATER_WEIGHT_GROWTH = ratio(1.2, "weights that the start moved too far hardly grow later")
MIN_RUNAWAY_GROWTH = ratio(3.0, "last weight norm over the first; healthy runs: 1.0 to 2.3")
MAX_MOTION_AT_REST = of_weights(0.02, "weights without a gradient, or with all they can learn")
MAX_MOTION_AT_LOW_RATE = of_weights(1e-3, "change of the weight norm; healthy runs: 0.04 to 1.3")
MIN_MOTION_AT_HIGH_RATE = of_weights(0.05, "change of the weight norm; healthy runs: 0.04 to 1.3")
MAX_SUM_OF_NO_RATES = rate_sum(1e-5, "no weight of Adam moves further than this sum")
MAX_SUM_OF_LOW_RATES = rate_sum(0.02, "moves no weight far: the start of a gentle fine-tuning")
MIN_GROWTH_TO_INFINITY = ratio(
    3.0, "loss or norm before NaN, over their usual: more than batches do"
)
MAX_RELATIVE_CURVATURE = of_level(
    0.01, "largest half second difference of the validation loss for a run counted as steady"
)
MAX_CLASSES_FROM_LOSS = classes(10, "above it any first loss is near the logarithm of some number")
MAX_FIRST_LOSS_OFF_LOG_CLASSES = of_guess(0.015, "half the gap between log(9) and log(10) is 0.023")
MAX_FIRST_LOSS_OFF_GUESS = of_guess(0.1, "default initialisations start within it")
MAX_LEARNT_LOSS_OF_GUESS = of_guess(0.85, "who guesses by class frequencies rarely gets below it")
MIN_LEARNT_SKILL = _in("of the way from chance to all right")(0.3, "unbalanced classes give less")
MIN_GRADIENT_SPIKE = ratio(
    6.0, "norm over the median of the rows before; healthy: 99.5 % below 5.2"
)
MIN_SPIKE_SHARE = of_updates(0.015, "fewer are single hard batches")
MIN_SPIKE_BEYOND_EXPECTED = ratio(
    3.0, "norm over what loss, or other towers, let expect of the row"
)
MAX_TINY_SENSITIVITY = ratio(1e-2, "norm times weight norm over loss; healthy runs: 1.9 to 104")
MAX_TINY_GRADIENT = ratio(1e-3, "norm over loss, where the weight norm was not recorded")

# -- rate too high ---------------------------------------------------------------------------------

MIN_DIVERGED_RISE = of_first_loss(0.25, "more than a hard batch or a vague start explains")
MIN_SHARE_ABOVE_FIRST = of_run(0.2, "a jump at the start has come back by then")
MIN_SHARE_ABOVE_FIRST_AT_PEAK_RATE = of_run(0.05, "after the first tenth, where it came back later")
MIN_THROWN_LOSS = ratio(2.0, "over the first loss: batches of a fresh model differ by less")
MAX_DROP_AFTER_RUNAWAY = of_first_loss(0.2, "weights that tripled and learnt should show more")
FAR_RUNAWAY_GROWTH = ratio(8.0, "weights that went so far")
MAX_DROP_AFTER_FAR_RUNAWAY = of_first_loss(0.5, "and should show still more")
MAX_NOISE_OF_STEADY_LOSS = of_level(0.01, "a loss that bounces has more")
MIN_BOUNCE_RISE = of_first_loss(0.03, "a loss that learns nothing ends where it began, not above")
MAX_CURVATURE_AT_REST = of_level(0.005, "evaluations of weights that do not bounce")
MIN_BOUNCE_PER_NOISE = ratio(0.25, "of evaluations over that of batches: at rest it is near zero")
MIN_GAIN_LOST_AGAIN = of_gain(0.25, "at a rate that is kept")
MAX_DROP_OF_WANDERING = of_first_loss(
    0.4, "a run that came further has learnt, whatever it does now"
)
MIN_BOUNCE_OF_WANDERING = of_gain(0.08, "of evaluations")

MAX_ROWS_BEFORE_EARLY_BREAK = rows(12, "a run without a warm-up breaks within them, if it breaks")
MIN_GROWTH_AT_START = ratio(1.5, "loss or norm before NaN, over the first")
MIN_DROP_AFTER_THROW = of_first_loss(0.1, "less, and it is the rate of the whole run")
MIN_LOSS_RISE_OF_THROW = ratio(1.2, "small weights grow at a good rate, too, without a rise")
MIN_START_JUMP = of_first_loss(0.2, "of the median of the first rows, above noise")
MIN_SUM_ABOVE_FIRST = of_first_loss(0.8, "summed over ten rows, where gradients grew, too")
MIN_SUM_ABOVE_FIRST_WITHOUT_NORMS = of_first_loss(2.0, "where gradients were not recorded")
MIN_GRADIENT_BEYOND_LOSS = ratio(
    1.3, "growth of the norm over the root of the loss's, see `_adds_up`"
)
MIN_KICK = of_first_loss(0.3, "rise with the first or second update")
MIN_GRADIENT_KICK = ratio(4.0, "gradient norm then, over the first")
MIN_LOSS_OVER_GUESS = ratio(1.5, "over log(C): no batch is so hard to guess")
MIN_RECOVERED_DROP = of_first_loss(0.2, "a run at the same rate that recovers comes below by this")
MAX_RECOVERY_SHARE = of_run(0.35, "longer, and it is the rate of the whole run")
ROWS_OF_NOISE_AFTER_START = rows(40, "enough for a standard deviation within 20 %")

MIN_DROP_TO_PLATEAU = of_first_loss(0.15, "less is no plateau that was come down to")
MAX_LATE_FALL = of_gain(0.1, "from the third fifth to the last; healthy runs: median 0.03, to 0.28")
MIN_GROWTH_ON_PLATEAU = ratio(4.0, "last weight norm over the first; healthy runs: 1.0 to 2.3")
MIN_GROWTH_OF_SMALL_BOUNCE = ratio(2.0, "below it a small bounce is the noise of small batches")
MIN_BOUNCE_ON_PLATEAU = of_gain(
    0.03, "half second difference of the evaluations; healthy runs: to 0.009"
)
MIN_BOUNCE_OF_LEVEL = of_level(0.06, "half second difference of evaluations; healthy runs: to 0.04")
MAX_FALL_ON_PLATEAU = of_level(0.2, "from the third quarter to the fourth")
MAX_FALL_OF_FITTING_RUN = of_level(0.35, "a run that is fitting its data still falls more")
MAX_LATE_GAIN_ON_PLATEAU = of_gain(0.05, "of the validation loss, in the second half of the rates")

# -- rate too low, schedule ------------------------------------------------------------------------

MIN_UPDATES_TO_JUDGE_RATE = updates(50, "in fewer no rate brings a run far")
MAX_DROP_AT_LOW_RATE = of_first_loss(0.12, "a line that brings more is a run that learns")
MAX_FALL_BEFORE_LINE = ratio(0.8, "fall before a line over that on it: more is a curve")
MIN_EVENNESS_OF_LINE = ratio(0.6, "of the falls of both halves: a curve that learns bends more")
MAX_LINEARITY_OF_NOISY_LINE = correlation(-0.85, "of the smoothed loss with its order")
MAX_ENDED_RATE = of_peak_rate(0.02, "cosines end at 0.1 or at 0, step decay above it")
MAX_STANDING_RATE = of_peak_rate(0.002, "moves no weight; the last stage of step decay is above it")
MIN_SHARE_AFTER_SCHEDULE = of_run(0.2, "the last tenth of a cosine to zero lies below `ENDED`, too")
MIN_FALL_BEFORE_SCHEDULE_END = of_gain(0.03, "in a tenth of the run: the loss was still falling")
MAX_LATE_RATE_OF_RISE = of_peak_rate(0.93, "at 70 % of the run: a rate that still climbs")

# -- gradients -------------------------------------------------------------------------------------

MIN_FAR_SPIKES = times_counted(2, "ten times the usual norm: a single one is a hard batch")
MIN_GROWTH_OF_NORM = ratio(8.0, "last norm over the early one, of a run that explodes slowly")
MIN_STEEP_SENSITIVITY = ratio(
    50.0, "norm x weights / loss at the first row; healthy runs: 0.6 to 15"
)
MIN_NORM_PER_FIRST_LOSS = ratio(15.0, "median norm over the first loss")
MIN_FACTOR_OF_UNSTEADY_NORM = ratio(2.0, "of neighbouring norms, in the median")
MAX_FADED_NORM = ratio(0.1, "median of the early norms over the first: lower has vanished")
ROWS_OF_FIRST_NORMS = rows(20, "or a tenth of the run")
MAX_ROWS_BEFORE_OVERFLOW = rows(3, "before the first that is not finite, of a run out of scale")
MIN_FIRST_LOSS_OVER_GUESS = ratio(2.5, "over log(C): no run in scale begins there")
LARGE_VOCABULARY = classes(50_000, "of a language model that does not state its own")

MAX_VANISHED_NORM = ratio(0.03, "last norm over the highest level")
MAX_FADED_NORM_OF_SAME_ANSWER = ratio(0.12, "where batches make no difference any more")
MAX_NOISE_OF_SAME_ANSWER = of_level(0.005, "of such a loss")
MAX_FADED_NORM_AFTER_LOSS = ratio(0.2, "where all that was learnt is lost again")
MAX_SKILL_OF_GUESS = _in("of the way from chance to all right")(0.1, "nothing was learnt")
MAX_NORM_AFTER_MEAN = ratio(0.06, "late norm over that of the updates which found the mean answer")
MAX_SENSITIVITY_OF_VANISHED = ratio(0.2, "as `MAX_TINY_SENSITIVITY`; healthy runs: 1.9 to 104")
MAX_NORM_LOST = ratio(1e-4, "of one part's norm over another's")
MIN_GROWTH_OF_SUM = ratio(5.0, "of the norm since the first update")
MIN_LINEARITY_OF_SUM = correlation(0.95, "of the ranks of the norms with their order")
MIN_SPIKES_PER_OTHER_TOWER = ratio(3.0, "so many more than any other tower")

# -- not finite ------------------------------------------------------------------------------------

MIN_HALVINGS_OF_SCALE = times_counted(6, "net, after the first twentieth: more than a search")
MIN_OVERFLOW_SHARE = of_updates(0.05, "a scale that doubles each 2,000 updates costs 0.05 %")

# -- data ------------------------------------------------------------------------------------------

MIN_SPIKE_SIGMAS = sigmas(8.0, "of a loss above its level; healthy ones reach 10, see the next two")
MIN_SPIKE_PER_GAIN = of_gain(0.3, "height of a spike that matters")
MIN_DECAYS_BEYOND_TAIL = _in("decay lengths")(10.0, "a chance of e^-10 for an exponential tail")
MAX_LOSS_OFF_GUESS = of_guess(0.03, "of a loss that is a guess's")
MAX_NOISE_OF_GUESS = of_level(
    0.03, "fresh models with wrong labels: to 0.021; fine-tunings from 0.04"
)
MIN_TREND_OF_LEARNING = _in("standard errors")(2.5, "of the rank correlation: one chance in 160")
MIN_VALIDATION_FALL = of_level(0.15, "it has learnt for sure")
MIN_STEADY_VALIDATION_FALL = of_level(0.003, "frequencies alone bring less in the second half")
MIN_MOTION_OF_LEARNING = of_weights(3e-3, "weights that moved less tell nothing of the labels")
MIN_MOTION_AT_GUESS = of_weights(1e-3, "where the loss is known to be a guess's")
MIN_CLASSES_OF_VOCABULARY = classes(20, "from which a loss comes down by frequencies at all far")
MAX_NOISE_OF_MANY_TOKENS = of_level(0.08, "of a mean over the tokens of a batch")
MAX_SPREAD_OF_SAME_ACCURACY = accuracy(1e-4, "of a model that gives one answer to all")
MAX_ACCURACY_OF_ONE_CLASS = accuracy(0.9, "above it the same accuracy may be a good one")

MIN_ROWS_FOR_CUBIC = rows(12, "of an epoch: in fewer a cubic leaves next to nothing")
MIN_AGREEMENT = correlation(0.35, "of the same places in two following epochs")
MIN_AGREEMENT_OF_ONE_PAIR = correlation(0.6, "two parts of a learning curve may correlate")
MIN_SPREAD_OF_FOLD = ratio(0.25, "of an epoch's pattern over that of the largest")
MIN_SWING_PER_RESIDUAL = ratio(1.2, "of the pattern over what varies from epoch to epoch")

MIN_CORRELATION_OF_SUM = correlation(0.6, "of a batch's loss, off its level, with its items")
MIN_RATIO_OF_UNEVEN_ITEMS = ratio(4.0, "90th over 10th percentile: its root is a factor 2 in noise")
MIN_SHARE_OF_SMALL_BATCHES = of_updates(0.25, "the last ones of short epochs are fewer")
MIN_SHARE_OF_LARGE_BATCHES = of_updates(0.1, "too few to compare with")
MIN_SHORT_BATCHES = times_counted(6, "whose losses tell more than chance")
MIN_RATIO_OF_DEVIATIONS = ratio(1.6, "of small batches over large ones")

MAX_LEARNT_SHARE = of_first_loss(0.05, "no honest language model gets below it")
MIN_CLASSES_TO_LEAK = classes(16, "no honest run of one epoch gets so low")
MIN_SYMBOLS_OF_LANGUAGE = classes(40, "below it a vocabulary is none of a language")
MAX_CLASSES = classes(1_000_000, "a first loss above its logarithm is none of a guess")
MAX_SHARE_IN_HALF_AN_EPOCH = of_first_loss(0.01, "no honest run gets there on half of the samples")
MAX_SHARE_OF_RUN_TO_LEAK = of_run(0.15, "within which it does where the target leaks")
MIN_SHARE_OF_GUESS = of_first_loss(0.9, "a validation loss above it has learnt nothing")
MAX_LEARNT_SHARE_OF_NEW_SAMPLES = of_first_loss(
    0.1, "while the validation loss is not down to half"
)

# -- training against validation, loss function ----------------------------------------------------

MIN_RISE_PER_GAIN = of_gain(0.15, "of the validation loss since its best")
MIN_STEADY_RISE_PER_BEST = ratio(0.2, "over the best, where it rises without a break")
MIN_LINEARITY_OF_RISE = correlation(0.85, "of the evaluations after the best with their order")
MAX_FITTED_LOSS_PER_BEST = ratio(0.2, "train over best validation loss: memorized")

MIN_SHARE_LEFT = of_first_loss(0.5, "a loss that came further is not high")
MIN_SHARE_LEFT_OF_FEW_CLASSES = of_first_loss(0.58, "above what a good deal of wrong labels leaves")
MIN_DROP_TO_UNDERFIT = of_first_loss(0.05, "less is a run that learnt nothing at all")
MAX_LATE_GAIN = of_gain(
    0.045, "in the second half of the rates; a third of it at a rate that is kept"
)
MAX_LATE_GAIN_NEAR_GUESS = of_gain(0.2, "where most of the loss of few classes is left")
MAX_FEW_CLASSES = classes(14, "above it half of a guess's loss is what language models end with")
MAX_GAP_PER_DROP = of_gain(0.12, "between train and validation: what is too small learns no sample")
MAX_CURVATURE_OF_STALL = of_gain(0.02, "of evaluations of weights at rest")
MIN_GOOD_ACCURACY = accuracy(0.8, "from which on a loss is not high")
MIN_GOOD_ACCURACY_OF_MANY = accuracy(0.2, "among many classes, such as characters")
MAX_SKILL_TO_UNDERFIT = _in("of the way from chance to all right")(
    0.45, "all that noisy labels hold"
)

MAX_SHARE_FOLLOWED = share(0.3, "of the way of the train loss that the validation loss has gone")
MIN_RISE_AFTER_BEST = of_first_loss(0.05, "of a validation loss that turned")
MIN_MEAN_DROP_TO_FOLLOW = of_first_loss(0.1, "less gives a validation loss nothing to follow")

MAX_SPREAD_OF_START = of_first_loss(0.03, "of the first rows of a loss that has not left its start")
MAX_OFF_FLOOR = share(0.01, "of the floor, of a loss that has come to it, and of its noise")
MAX_OFF_FLOOR_OF_ACCURACY = share(
    0.02, "of the floor plus the share of errors, of the training loss"
)
MAX_WAY_TO_FLOOR = share(0.1, "of the way to the floor that is left, where no accuracy tells")
MAX_NOISE_AT_FLOOR = share(0.02, "of the floor, where each answer is as sure as it can be")

# -- resources, resume -----------------------------------------------------------------------------

MIN_GROWTH_OF_MEMORY = share(0.02, "of the memory, from the first to the last quarter")
MIN_WAITING_SHARE = of_time(0.3, "spent waiting for data")
MIN_DEVICE_UTILIZATION = of_time(0.7, "of a device that is well used")
MIN_SPEED_UP_OF_WEIGHTS = ratio(2.0, "change of the norm from row to row over the largest before")
MIN_GAIN_KEPT = of_gain(0.5, "if only the count of updates restarts")
MIN_ODD_FACTOR_OF_RATE = ratio(1.25, "from one row to the next: no smooth schedule has it")
