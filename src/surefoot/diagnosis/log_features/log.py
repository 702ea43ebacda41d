"""All features of one log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from surefoot.diagnosis import thresholds as limits
from surefoot.diagnosis.log_features.breakage import BreakageFeatures
from surefoot.diagnosis.log_features.classes import ClassFeatures
from surefoot.diagnosis.log_features.evaluations import EvaluationFeatures
from surefoot.diagnosis.log_features.gradients import GradientFeatures
from surefoot.diagnosis.log_features.loss import ProgressFeatures, StartFeatures
from surefoot.diagnosis.log_features.weights import ScheduleFeatures, WeightFeatures
from surefoot.diagnosis.recording import Recording
from surefoot.diagnosis.robust import RobustSeries


class LogFeatures:
    """What the causes look at.

    Attributes:
        recording: the log as it was read.
        loss: the training loss of each row.
        gradient: the global gradient norm of each row.
        rate: the learning rate of each row; of several groups the largest.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.loss = RobustSeries(recording["loss"])
        self.gradient = RobustSeries(recording["grad_norm"])
        self.rate = RobustSeries(recording["lr"])

    @cached_property
    def start(self) -> StartFeatures:
        return StartFeatures(self.loss)

    @cached_property
    def progress(self) -> ProgressFeatures:
        return ProgressFeatures(self.loss, self.start, self.rate)

    @cached_property
    def weights(self) -> WeightFeatures:
        return WeightFeatures(self.recording)

    @cached_property
    def schedule(self) -> ScheduleFeatures:
        return ScheduleFeatures(self.rate)

    @cached_property
    def gradients(self) -> GradientFeatures:
        return GradientFeatures(self.gradient, self.loss, self.weights)

    @cached_property
    def breakage(self) -> BreakageFeatures:
        return BreakageFeatures(self.recording, self.start)

    @cached_property
    def classes(self) -> ClassFeatures:
        return ClassFeatures(self.recording, self.loss, self.start)

    @cached_property
    def evaluations(self) -> EvaluationFeatures:
        return EvaluationFeatures(self.recording, self.loss, self.start, self.rate)

    @property
    def validation(self) -> RobustSeries:
        """The validation loss of each evaluation."""
        return self.evaluations.losses

    @property
    def first_loss(self) -> float:
        """The loss before anything was learnt."""
        return self.start.loss

    @property
    def has_shape(self) -> bool:
        """Whether there are enough losses for a curve."""
        return len(self.loss) >= limits.MIN_ROWS

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite in all rows, overflows of a scaler apart."""
        return self.breakage.row is None


QUANTITIES: Mapping[str, Callable[[LogFeatures], object]] = {
    "first_loss": lambda log: log.first_loss,
    "last_loss": lambda log: log.loss.end,
    "highest_level": lambda log: float(log.loss.smooth.max()),
    "share_above_first": lambda log: log.progress.share_above_first,
    "noise": lambda log: log.loss.noise,
    "relative_drop": lambda log: log.progress.drop,
    "last_step": lambda log: log.recording.last_step,
    "rows": lambda log: log.recording.num_rows,
    "peak_rate": lambda log: float(log.rate.values.max()),
    "sum_of_rates": lambda log: log.schedule.sum,
    "weight_norm_growth": lambda log: log.weights.growth,
    "weight_motion": lambda log: log.weights.motion,
    "median_grad_norm": lambda log: log.gradients.median,
    "accuracy": lambda log: log.classes.accuracy,
    "validation_set": lambda log: log.evaluations.set_name or None,
    "last_validation_loss": lambda log: log.evaluations.last,
}
"""Features that the message of a sign may name without being given them."""
