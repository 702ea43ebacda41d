"""What several causes look at, computed once for a recording. Judges nothing."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from surefoot.diagnosis.curve import Curve, bend, ranks, recent_growth, spread, straightness
from surefoot.diagnosis.recording import Floats, Recording, Series

SHORTEST = 8
"""A curve with fewer rows has no shape."""
FLAT = 0.045
"""A loss that came down by less than this share of its start has not moved."""
LEAVING = 10
"""First rows among which the very first is the highest or lowest, where weights leave at once."""
VAGUE = 0.1
"""Standard error of the first loss, as a share of it, with which it tells nothing."""
BETTER = 0.85
"""Share of log(C) below which a loss is no guess's among C classes."""
NEAR_GUESS = 0.015
"""Share by which a first loss may be off the logarithm of a number of classes that nobody told."""
FEW_CLASSES = 10
"""Classes above which the logarithms lie too close to tell one from the next."""
EARLY = 0.05
"""Share of the run in which too high a first rate throws the weights."""
STOOD = 1.2
"""Times what they were then by which they grow later, at most."""
STEADY = 0.01
"""Share of their level by which evaluations bend, at most, of weights that grow in peace."""
HALF = ("fp16", "float16", "half", "16-mixed", "16")


class Signals:
    """A recording, and the shapes of its curves."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    # -- curves --------------------------------------------------------------------------------

    @cached_property
    def loss(self) -> Curve:
        return Curve(self.recording["loss"])

    @cached_property
    def gradient(self) -> Curve:
        return Curve(self.recording["grad_norm"])

    @cached_property
    def rate(self) -> Curve:
        return Curve(self.recording["lr"])

    @cached_property
    def validation(self) -> Curve:
        return Curve(self.recording.validation[1])

    @property
    def validation_name(self) -> str:
        return self.recording.validation[0]

    @cached_property
    def has_shape(self) -> bool:
        return len(self.loss) >= SHORTEST

    # -- the loss ------------------------------------------------------------------------------

    @cached_property
    def initial(self) -> float:
        """The loss before anything was learnt: the level of the first rows, or the very first value
        where the weights have left at once."""
        if not len(self.loss):
            return float("nan")
        return float(self.loss.values[0]) if self.leaves_at_once else self.loss.start

    @cached_property
    def leaves_at_once(self) -> bool:
        """Whether the very first loss is far from the level of the first rows, and from each."""
        values, start, noise = self.loss.values, self.loss.start, self.loss.noise
        if len(values) < 2 or self.loss.series.steps[0] > 1:
            return False
        first, others = float(values[0]), values[1 : max(2, min(2 * LEAVING, len(values) // 4))]
        rises = float(others[: LEAVING // 2].min()) - first
        is_inside = bool(others[:LEAVING].min() <= first <= others[:LEAVING].max())
        by_chance = is_inside or 0 < rises < 0.5 * spread(others)
        within_noise = abs(first - start) < 2.5 * noise and noise < 0.3 * abs(first)
        return abs(first - start) > 0.2 * abs(first) and not (by_chance or within_noise)

    @cached_property
    def initial_error(self) -> float:
        """Standard error of `initial`; that of one row before the weights left is not known."""
        if self.leaves_at_once:
            return 0.0
        return self.loss.error_of_median(self.loss.num_first)

    @cached_property
    def start_is_vague(self) -> bool:
        """Whether the first rows differ so much that nobody can say what the loss began with."""
        return self.initial_error > VAGUE * abs(self.initial)

    @cached_property
    def trend(self) -> float:
        """Rank correlation of the loss with its order after the first tenth: how clearly it falls
        (-1) or rises (1), on the scale of its noise."""
        later = self.loss.part(0.1, 1) if len(self.loss) else np.empty(0)
        return straightness(ranks(later))

    @cached_property
    def early_noise(self) -> float:
        """Noise of the first rows: that of the run, which grows with the level of the loss."""
        level = max(abs(float(np.median(self.loss.values))), 1e-30)
        return self.loss.noise * min(10.0, max(1.0, abs(self.loss.start) / level))

    @property
    def begins_at_start(self) -> bool:
        """Whether the first loss of the log is that of the first updates that it could hold."""
        steps = self.loss.series.steps
        every = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
        return len(steps) > 0 and float(steps[0]) <= max(1.0, every)

    @cached_property
    def relative_drop(self) -> float:
        """Share of the first loss by which the level came down."""
        return (self.initial - self.loss.end) / max(abs(self.initial), 1e-30)

    @cached_property
    def is_flat(self) -> bool:
        """Whether the loss has, for most of the run, stayed at the level of its start."""
        if not self.has_shape:
            return False
        return abs(self.relative_drop) < FLAT and self._never_left

    @cached_property
    def is_flat_but_for_noise(self) -> bool:
        """`is_flat`, or as flat as can be told: the level of the first rows is known no better than
        their noise allows, and from there on the loss stands still."""
        if not self.has_shape or not self._never_left:
            return False
        later = abs(self.loss.level(0.05, 0.3) - self.loss.end)
        stands = later < max(FLAT * abs(self.initial), 3 * self.loss.standard_error())
        return self.is_flat or (
            abs(self.initial - self.loss.end) < 2.5 * self.initial_error and stands
        )

    @property
    def _never_left(self) -> bool:
        margin = max(2 * FLAT * abs(self.initial), 3 * self.loss.noise)
        return self.loss.lowest > self.initial - margin

    def progress_per_rate(self, parts: int) -> Floats:
        """How far the loss fell over parts of the run in which the rates sum up to the same.

        The first twentieth is left out: some of it is the end of random weights.
        """
        loss, rate = self.loss, self.rate
        total = np.arange(1.0, len(loss) + 1)
        if len(rate) == len(loss):
            total = np.cumsum(rate.values)
        begin, last = len(loss) // 20, len(loss) - 1
        sums = np.linspace(total[begin], total[-1], parts + 1)
        places = np.clip(np.searchsorted(total, sums), begin, last)
        places[0], places[-1] = begin, last
        return -np.diff(loss.smooth[places])

    # -- what is not finite --------------------------------------------------------------------

    @cached_property
    def overflow_rows(self) -> frozenset[int]:
        """Rows whose gradients overflowed under a loss scale, while the loss was finite: the scaler
        skips such an update and lowers the scale, which is how fp16 works."""
        scaled: set[int] = set()
        scale = self.recording["loss_scale"].finite
        if not (scale.values == 1.0).all():
            scaled.update(scale.rows.tolist())
        if self.is_half:
            applied = self.recording["applied"]
            scaled.update(applied.rows[applied.values == 0.0].tolist())
        return frozenset((_not_finite(self.recording["grad_norm"]) & scaled) - self._broken_loss)

    @cached_property
    def _broken_loss(self) -> set[int]:
        return _not_finite(self.recording["loss"])

    @property
    def is_half(self) -> bool:
        """Whether the run is known to compute in fp16."""
        return str(self.recording.facts.get("precision", "")).lower() in HALF

    @cached_property
    def broken_rows(self) -> frozenset[int]:
        """Rows whose loss or gradient norm is not finite, overflows that a scaler met left out."""
        broken = self._broken_loss | _not_finite(self.recording["grad_norm"])
        return frozenset(broken - self.overflow_rows)

    @cached_property
    def broke_at(self) -> int | None:
        """The first row whose loss or gradient norm is not finite."""
        return min(self.broken_rows, default=None)

    @cached_property
    def inputs_are_finite(self) -> bool | None:
        """Whether the inputs of the first row that broke were, where the log says so."""
        if self.broke_at is None:
            return None
        count, largest = (
            self.at("bad_inputs", self.broke_at),
            self.at("largest_input", self.broke_at),
        )
        if count is not None:
            return count == 0
        return None if largest is None else math.isfinite(largest)

    def at(self, name: str, row: int) -> float | None:
        """The value of a series in one row."""
        series = self.recording[name]
        position = int(np.searchsorted(series.rows, row))
        if position < len(series) and int(series.rows[position]) == row:
            return float(series.values[position])
        return None

    def step_of_row(self, row: int) -> int:
        """Updates completed, as the row says."""
        for series in self.recording.columns.values():
            position = int(np.searchsorted(series.rows, row))
            if position < len(series) and int(series.rows[position]) == row:
                return series.step(position)
        return 0

    def before_row(self, name: str, row: int) -> Floats:
        """Finite values of a series before a row."""
        series = self.recording[name].finite
        return series.values[series.rows < row]

    @cached_property
    def growth_before_break(self) -> float:
        """By how much loss or gradient norm had grown just before the first row that is not
        finite: the largest of its last three values over the median of the ones before. A norm
        varies more than a loss, and counts for a third."""
        if self.broke_at is None:
            return 1.0
        before = self.before_row("loss", self.broke_at)
        peak = float(before.max()) if len(before) else 0.0
        return max(
            peak / self.initial if self.initial > 0 else 1.0,
            recent_growth(before),
            recent_growth(self.before_row("grad_norm", self.broke_at)) / 3,
        )

    @cached_property
    def gradients_explode_at_once(self) -> bool:
        """Whether the gradient norm shoots up, among others in the first tenth of the run, from a
        level that it had in the first updates, and no weights have run away: no rate made it so."""
        values = self.gradient.values
        if len(values) < 20:
            return False
        first = self.gradient.part(0, 0.1)
        usual, early = max(float(np.median(values)), float(np.median(first))), float(first.max())
        often = float((values > 6 * usual).mean()) > 0.015
        often = often and float(self.gradient.part(0.5, 1).max()) > 6 * usual
        ran = self.weight_growth is not None and self.weight_growth > 2
        return (
            often and early > 6 * usual and float(np.median(values[:3])) > 0.5 * usual and not ran
        )

    # -- rate and weights ----------------------------------------------------------------------

    @cached_property
    def starts_at_full_rate(self) -> bool | None:
        """Whether the first update has at least half of the highest rate of the first rows."""
        rate = self.rate
        if len(rate) < 2:
            return None
        return bool(rate.values[0] >= 0.5 * rate.values[: max(20, len(rate) // 10)].max())

    @cached_property
    def rate_is_kept(self) -> bool | None:
        """Whether the rate over the last tenth is still a third of its peak."""
        if len(self.rate) < 2:
            return None
        return bool(np.median(self.rate.part(0.9, 1)) > 0.33 * self.rate.values.max())

    @cached_property
    def weight_growth(self) -> float | None:
        """Last weight norm over the first."""
        norms = self.recording["weight_norm"].finite.values
        return float(norms[-1] / norms[0]) if len(norms) > 1 and norms[0] > 0 else None

    @cached_property
    def weight_motion(self) -> float | None:
        """Largest relative change of the weight norm since the first."""
        norms = self.recording["weight_norm"].finite.values
        if len(norms) < 3 or norms[0] <= 0:
            return None
        return float(np.abs(norms / norms[0] - 1).max())

    @cached_property
    def weights_were_thrown(self) -> float | None:
        """Times their norm to which the first updates threw the weights, if they stand there."""
        norms = self.recording["weight_norm"].finite
        if len(norms) < 5 or norms.values[0] <= 0 or not self.weights_known_from_start:
            return None
        early = float(np.interp(EARLY * self.recording.last_step, norms.steps, norms.values))
        stood = norms.values[-1] < STOOD * early
        return early / float(norms.values[0]) if early > 2 * norms.values[0] and stood else None

    @cached_property
    def weights_known_from_start(self) -> bool:
        """Whether the first weight norm is that of weights that had hardly been trained."""
        norms = self.recording["weight_norm"].finite
        return len(norms) > 0 and norms.steps[0] <= max(5, 0.02 * self.recording.last_step)

    @cached_property
    def rate_sum(self) -> float | None:
        """Sum of the rates of all updates; an adaptive optimizer moves no weight further."""
        if not len(self.rate):
            return None
        steps = max(1.0, float(self.rate.series.steps[-1]))
        return float(self.rate.values.mean() * steps)

    @property
    def rate_is_nothing(self) -> bool:
        """Whether the rates add up to so little that no weight could move, though it would."""
        return self.rate_sum is not None and self.rate_sum < 1e-5

    @cached_property
    def sensitivity(self) -> float | None:
        """Relative change of the loss for a relative change of the weights, at its median:
        gradient norm times weight norm over the loss."""
        norms = self.recording["weight_norm"].finite.values
        gradient = self.gradient.values
        if not len(norms) or not len(gradient) or not self.has_shape:
            return None
        scale = max(abs(float(np.median(self.loss.values))), 1e-30)
        return float(np.median(gradient)) * float(np.median(norms)) / scale

    @cached_property
    def gradient_is_tiny(self) -> bool:
        """Whether there are gradients, and next to nothing of them for such a loss."""
        values = self.gradient.values
        if not len(values) or not self.has_shape or float(np.median(values)) == 0.0:
            return False
        weights = self.recording["weight_norm"].finite.values
        scale = float(np.median(weights)) if len(weights) else 1.0
        level = max(abs(float(np.median(self.loss.values))), 1e-30)
        return float(np.median(values)) * scale < (1e-2 if len(weights) else 1e-3) * level

    # -- what a guess would score ---------------------------------------------------------------

    @cached_property
    def num_classes(self) -> int | None:
        known = self.recording.facts.get("num_classes")
        return known if isinstance(known, int) and known > 1 else None

    @cached_property
    def classes_of_guess(self) -> int | None:
        """The number of classes, or what a first loss says that is the logarithm of few of them,
        where the first accuracy is a guess's, too."""
        nearest = round(math.exp(min(max(self.initial, 0.0), 20.0))) if self.has_shape else 0
        if self.num_classes is not None or not 2 <= nearest <= FEW_CLASSES:
            return self.num_classes
        near = abs(self.initial / math.log(nearest) - 1) < NEAR_GUESS
        guesses = len(self.accuracies) > 0 and self.accuracies[0] < 1.5 / nearest
        return nearest if near and guesses else None

    @cached_property
    def is_language(self) -> bool:
        """Whether the run counts tokens or reports perplexity."""
        tokens = self.recording["tokens"].finite.values
        names = " ".join([*self.recording.evaluations, *self.recording.ignored])
        words = ("perplexity", "ppl", "bits_per_byte", "token")
        counted = len(tokens) > 0 and float(tokens.max()) > 0
        said = str(self.recording.facts.get("task", "")) in ("generation", "lm")
        return counted or said or any(word in names for word in words)

    @cached_property
    def accuracies(self) -> Floats:
        """Accuracies of the validation set, from 0 to 1; none where they were not recorded."""
        for name, series in self.recording.evaluations.items():
            its_own = name.startswith(f"{self.validation_name}/")
            if its_own and "acc" in name and len(values := series.finite.values):
                return values / 100 if values.max() > 1 else values
        return np.empty(0)

    @property
    def accuracy(self) -> float | None:
        """The last of them."""
        return float(self.accuracies[-1]) if len(self.accuracies) else None

    @cached_property
    def skill(self) -> float | None:
        """The last accuracy of the validation set, from 0 for a guess to 1."""
        classes = self.num_classes or math.exp(min(max(self.initial, 0.7), 20.0))
        return None if self.accuracy is None else (self.accuracy - 1 / classes) / (1 - 1 / classes)

    @cached_property
    def begins_trained(self) -> bool:
        """Whether the first loss, or the first accuracy, is far better than a guess's."""
        first = float(self.accuracies[0]) if len(self.accuracies) else None
        return self._beats_a_guess(self.initial, first)

    @cached_property
    def knows_more(self) -> bool:
        """Whether the run is known to do better than a guess: its flat loss is a good one."""
        return self._beats_a_guess(self.loss.end, self.accuracy)

    def _beats_a_guess(self, loss: float, accuracy: float | None) -> bool:
        classes = self.num_classes
        if classes is not None and loss < BETTER * math.log(classes):
            return True
        chance = 1 / (classes or 2)
        return accuracy is not None and accuracy > chance + 0.3 * (1 - chance)

    # -- evaluations ---------------------------------------------------------------------------

    @cached_property
    def validation_jitter(self) -> float:
        """How much neighbouring evaluations of the later part bend, as a share of all that the
        loss came down. The same samples each time: it is the weights that bounce."""
        values = self.validation.part(0.4, 1) if len(self.validation) else np.empty(0)
        if len(values) < 4:
            return 0.0
        return bend(values) / max(abs(self.initial - self.loss.end), 1e-30)

    @cached_property
    def validation_left(self) -> float:
        """Share of all that the validation loss gained that was still to come after the updates
        which had half of the run's rate: near zero where it had come to a standstill by then,
        whatever the schedule."""
        validation, steps = self.validation, self.validation.series.steps
        if len(validation) < 4:
            return float("nan")
        share = steps / max(float(steps[-1]), 1.0)
        if len(self.rate) > 1:
            total = np.cumsum(self.rate.values)
            share = np.interp(steps, self.rate.series.steps, total / max(float(total[-1]), 1e-30))
        place = int(np.searchsorted(share, 0.5))
        middle = float(np.median(validation.values[max(0, place - 1) : place + 2]))
        end = float(np.median(validation.values[-max(2, len(validation) // 5) :]))
        return (middle - end) / max(abs(self.initial - end), 1e-30)

    @cached_property
    def follows_first(self) -> bool:
        """Whether the validation loss followed the train loss to its best evaluation, however it
        went on: a good part of the first loss, unless all samples were still new and most of the
        way was missing; or a small part, where they had been seen often."""
        values, steps = self.validation.values, self.validation.series.steps
        best = int(values.argmin())
        dip = max(self.initial, float(values[0])) - float(values[best])
        train = self.initial - self.train_around(float(steps[best]))
        share = dip / max(train, 0.1 * abs(self.initial - self.loss.lowest), 1e-30)
        epochs = self.recording["epoch"].finite
        seen = epochs.values[epochs.steps <= steps[best]]
        times = float(seen[-1] - epochs.values[0]) if len(seen) else None
        if dip > 0.1 * abs(self.initial):
            return times is None or times > 3 or share > 0.5
        return dip > 0.04 * abs(self.initial) and share > 0.1 and times is not None and times > 3

    @cached_property
    def validation_sway(self) -> float:
        """How much neighbouring evaluations of the later part bend, as a share of their level."""
        values = self.validation.part(0.4, 1) if len(self.validation) else np.empty(0)
        if len(values) < 3:
            return 0.0
        return bend(values) / max(abs(float(np.median(values))), 1e-30)

    @property
    def evaluations_are_steady(self) -> bool:
        """Whether evaluations, if there are enough, hardly bend: the weights move in peace."""
        return len(self.validation) > 4 and self.validation_sway < STEADY

    def train_around(self, step: float, rows: int = 0) -> float:
        """Level of the train loss at a step: the median of the rows just before it."""
        series = self.loss.series
        width = rows or max(5, len(series) // 20)
        values = series.values[series.steps <= step][-width:]
        return float(np.median(values)) if len(values) else self.loss.start

    # -- time ----------------------------------------------------------------------------------

    @cached_property
    def epoch_starts(self) -> Floats:
        """Positions in the loss at which a new epoch begins, the first among them."""
        if not self.recording.has("epoch"):
            return np.empty(0)
        _, epochs, _ = self.recording.aligned("epoch", "loss")
        if not np.isfinite(epochs).all():
            return np.empty(0)
        whole = np.floor(epochs)
        return np.flatnonzero(np.diff(whole, prepend=whole[:1] - 1) > 0).astype(np.float64)


def _not_finite(series: Series) -> set[int]:
    return set(series.rows[~np.isfinite(series.values)].tolist())
