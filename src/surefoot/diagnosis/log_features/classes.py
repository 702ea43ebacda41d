"""Features of what a guess would score: number of classes, accuracies, and what beats a guess."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.log_features.loss import StartFeatures
from surefoot.diagnosis.recording import Floats, Recording
from surefoot.diagnosis.robust import RobustSeries

LANGUAGE_METRICS = ("perplexity", "ppl", "bits_per_byte", "token")


class ClassFeatures:
    """Classes, vocabulary and accuracy."""

    def __init__(self, recording: Recording, loss: RobustSeries, start: StartFeatures) -> None:
        self._recording, self._loss, self._start = recording, loss, start

    @cached_property
    def known(self) -> int | None:
        """Number of classes that the log states."""
        stated = self._recording.facts.get("num_classes")
        return stated if isinstance(stated, int) and stated > 1 else None

    @property
    def guess_loss(self) -> float | None:
        """Cross-entropy of a guess among the classes that the log states: log(C)."""
        return None if self.known is None else math.log(self.known)

    @cached_property
    def of_first_loss(self) -> int | None:
        """Number of classes that the log states; or, for few of them, the one whose logarithm the
        first loss is, where the first accuracy is that of a guess."""
        has_shape = len(self._loss) >= limits.MIN_ROWS
        nearest = round(exp_capped(max(self._start.loss, 0.0))) if has_shape else 0
        if self.known is not None or not 2 <= nearest <= limits.MAX_CLASSES_FROM_LOSS:
            return self.known
        near = abs(self._start.loss / math.log(nearest) - 1) < limits.MAX_FIRST_LOSS_OFF_LOG_CLASSES
        guesses = len(self.accuracies) > 0 and self.accuracies[0] < 1.5 / nearest
        return nearest if near and guesses else None

    def starts_at_guess(self, tolerance: float) -> bool:
        """Whether the first loss is log(C) within a share of it, C being `of_first_loss`."""
        guess = math.log(self.of_first_loss or 1)
        return abs(self._start.loss - guess) < tolerance * guess

    def ends_at_guess(self, tolerance: float) -> bool:
        """Whether the last level is log(C) within a share of it, C being stated by the log."""
        guess = self.guess_loss
        return guess is not None and abs(self._loss.end / guess - 1) < tolerance

    @cached_property
    def is_language(self) -> bool:
        """Whether the run counts tokens or reports perplexity."""
        recording = self._recording
        tokens = recording["tokens"].finite.values
        names = " ".join([*recording.evaluations, *recording.ignored])
        counted = len(tokens) > 0 and float(tokens.max()) > 0
        stated = str(recording.facts.get("task", "")) in ("generation", "lm")
        return counted or stated or any(word in names for word in LANGUAGE_METRICS)

    @cached_property
    def accuracies(self) -> Floats:
        """[N] accuracies of the validation set, 0 to 1; empty where they were not recorded."""
        for name, series in self._recording.evaluations.items():
            is_of_set = name.startswith(f"{self._recording.validation[0]}/")
            if is_of_set and "acc" in name and len(values := series.finite.values):
                return values / 100 if values.max() > 1 else values
        return np.empty(0)

    @property
    def accuracy(self) -> float | None:
        """The last of them."""
        return float(self.accuracies[-1]) if len(self.accuracies) else None

    @cached_property
    def skill(self) -> float | None:
        """The last accuracy, rescaled: 0 for a guess, 1 for all right."""
        classes = self.known or exp_capped(max(self._start.loss, 0.7))
        return None if self.accuracy is None else (self.accuracy - 1 / classes) / (1 - 1 / classes)

    @cached_property
    def starts_above_guess(self) -> bool:
        """Whether the first loss, or the first accuracy, is far better than that of a guess."""
        first = float(self.accuracies[0]) if len(self.accuracies) else None
        return self._beats_guess(self._start.loss, first)

    @cached_property
    def ends_above_guess(self) -> bool:
        """Whether the last loss, or accuracy, is: a flat loss is a good one then."""
        return self._beats_guess(self._loss.end, self.accuracy)

    def _beats_guess(self, loss: float, accuracy: float | None) -> bool:
        if self.guess_loss is not None and loss < limits.MAX_LEARNT_LOSS_OF_GUESS * self.guess_loss:
            return True
        chance = 1 / (self.known or 2)
        least = chance + limits.MIN_LEARNT_SKILL * (1 - chance)
        return accuracy is not None and accuracy > least


def exp_capped(value: float) -> float:
    """exp, for what may be no logarithm of a number of classes: at most exp(20)."""
    return math.exp(min(value, 20.0))
