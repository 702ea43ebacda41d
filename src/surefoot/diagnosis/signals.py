"""What several causes look at, computed once for a recording. Judges nothing."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from surefoot.diagnosis.curve import Curve
from surefoot.diagnosis.recording import Recording, Series

SHORTEST = 8
"""A curve with fewer rows has no shape."""


class Signals:
    """A recording, and the shapes of its curves."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

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

    @cached_property
    def broke_at(self) -> int | None:
        """Position in the loss of the first row whose loss or gradient norm is not finite."""
        loss, gradient = self.recording["loss"], self.recording["grad_norm"]
        rows = [
            int(series.rows[position])
            for series in (loss, gradient)
            if (position := series.first_non_finite()) is not None
        ]
        if not rows or not len(loss):
            return None
        return int(np.searchsorted(loss.rows, min(rows)))

    def until_broken(self, name: str) -> Series:
        """The part of a series before the first row that is not finite."""
        series = self.recording[name]
        if self.broke_at is None or not len(series):
            return series
        loss = self.recording["loss"]
        end = loss.rows[self.broke_at] if self.broke_at < len(loss) else loss.rows[-1] + 1
        return series.where(series.rows < end)
