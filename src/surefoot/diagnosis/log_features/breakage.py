"""Features of values that are not finite: which rows, and what stood before the first of them."""

from __future__ import annotations

import math
from functools import cached_property

from surefoot.diagnosis.log_features.loss import StartFeatures
from surefoot.diagnosis.recording import Recording
from surefoot.diagnosis.robust import recent_growth

FP16_NAMES = ("fp16", "float16", "half", "16-mixed", "16")


class BreakageFeatures:
    """Where loss or gradient norm stopped being finite."""

    def __init__(self, recording: Recording, start: StartFeatures) -> None:
        self._recording, self._start = recording, start

    @property
    def is_fp16(self) -> bool:
        """Whether the run is known to compute in fp16."""
        return str(self._recording.facts.get("precision", "")).lower() in FP16_NAMES

    @cached_property
    def overflow_rows(self) -> frozenset[int]:
        """Rows whose gradients overflowed under a loss scale while the loss was finite: the scaler
        skips such an update and lowers the scale, which is how fp16 works."""
        recording, scaled = self._recording, set[int]()
        scale = recording["loss_scale"].finite
        if not (scale.values == 1.0).all():
            scaled.update(scale.rows.tolist())
        if self.is_fp16:
            applied = recording["applied"]
            scaled.update(applied.rows[applied.values == 0.0].tolist())
        overflowed = recording["grad_norm"].non_finite_rows & scaled
        return frozenset(overflowed - recording["loss"].non_finite_rows)

    @cached_property
    def rows(self) -> frozenset[int]:
        """Rows whose loss or gradient norm is not finite, `overflow_rows` left out."""
        broken = (
            self._recording["loss"].non_finite_rows | self._recording["grad_norm"].non_finite_rows
        )
        return frozenset(broken - self.overflow_rows)

    @cached_property
    def row(self) -> int | None:
        """The first of `rows`."""
        return min(self.rows, default=None)

    @property
    def step(self) -> int:
        """Updates completed at that row."""
        return self._recording.step_of_row(self.row or 0)

    @property
    def loss(self) -> float | None:
        """Loss of that row, which may be NaN or infinite; None where it holds none."""
        return None if self.row is None else self._recording.value_in_row("loss", self.row)

    @cached_property
    def losses_before(self) -> list[float]:
        """Finite losses before that row."""
        row = 0 if self.row is None else self.row
        return [float(value) for value in self._recording.before_row("loss", row)]

    @cached_property
    def comes_and_goes(self) -> bool:
        """Whether the loss is finite again after that row."""
        loss = self._recording["loss"]
        return len(loss.finite.rows[loss.finite.rows > (self.row or 0)]) > 0

    @cached_property
    def inputs_are_finite(self) -> bool | None:
        """Whether the inputs of that row were, where the log says so."""
        if self.row is None:
            return None
        count = self._recording.value_in_row("bad_inputs", self.row)
        if count is not None:
            return count == 0
        largest = self._recording.value_in_row("largest_input", self.row)
        return None if largest is None else math.isfinite(largest)

    @cached_property
    def growth_before(self) -> float:
        """Growth of loss or gradient norm just before that row: the largest of the last three
        values over the median of those before. A norm varies more, and counts for a third."""
        if self.row is None:
            return 1.0
        before = self._recording.before_row("loss", self.row)
        first, peak = self._start.loss, float(before.max()) if len(before) else 0.0
        return max(
            peak / first if first > 0 else 1.0,
            recent_growth(before),
            recent_growth(self._recording.before_row("grad_norm", self.row)) / 3,
        )
