"""Ends a run when a metric stops improving: a pure function of state and metric.

Holds no counter of its own: the state is a value and part of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from surefoot.core.errors import RequestError

Direction = Literal["min", "max"]
"""Which way is better."""


SMALLER_IS_BETTER: Final = frozenset(
    {"loss", "cross_entropy", "bits_per_byte", "perplexity", "mse", "mae", "rmse"}
)
LARGER_IS_BETTER: Final = frozenset({"accuracy", "f1", "recall", "precision", "average_precision"})


def usual_direction(metric: str) -> Direction | None:
    """Which way a metric is better by its name alone; None for a name that nobody knows.

    >>> usual_direction("validation/accuracy"), usual_direction("loss/fit"), usual_direction("x")
    ('max', 'min', None)
    """
    parts = metric.split("/")
    if "loss" in parts or parts[-1] in SMALLER_IS_BETTER:
        return "min"
    return "max" if parts[-1] in LARGER_IS_BETTER else None


def is_improvement(
    metric: float, best: float | None, direction: Direction, min_delta: float = 0.0
) -> bool:
    """Whether `metric` is more than `min_delta` better than `best`.

    The first finite value always is; NaN and infinity never are.

    >>> is_improvement(0.9, 1.0, "min"), is_improvement(1.0, 1.0, "min")
    (True, False)
    """
    if not math.isfinite(metric):
        return False
    if best is None:
        return True
    return metric < best - min_delta if direction == "min" else metric > best + min_delta


@dataclass(frozen=True, slots=True)
class StoppingState:
    """State of `EarlyStopping` between evaluations."""

    best: float | None = None
    """Best value so far; None before the first finite one."""
    bad_evaluations: int = 0
    """Evaluations without improvement since the best one."""

    def as_json(self) -> dict[str, Any]:
        """Plain data for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StoppingState:
        """The state written by `as_json`."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Stops at the `patience`-th evaluation in a row without improvement.

    `stopping(state, metric) -> (state, stop)`. An improvement is more than `min_delta` better than
    the best value so far; infinity never is. NaN is no measurement: it counts for nothing.

    >>> stopping = EarlyStopping(direction="max", patience=2)
    >>> state, stops = stopping.begin(), []
    >>> for accuracy in (0.5, 0.6, 0.6, 0.55):
    ...     state, stop = stopping(state, accuracy)
    ...     stops.append(stop)
    >>> stops
    [False, False, False, True]
    """

    direction: Direction
    patience: int
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1 or not 0 <= self.min_delta < float("inf"):
            raise RequestError(
                "the early-stopping rule is invalid",
                where=repr(self),
                rule="patience is at least 1, min_delta is finite and not negative",
            )

    def begin(self) -> StoppingState:
        """The state before the first evaluation."""
        return StoppingState()

    def __call__(self, state: StoppingState, metric: float) -> tuple[StoppingState, bool]:
        """The next state, and whether the run ends now."""
        if math.isnan(metric):
            return state, self.verdict(state)
        if is_improvement(metric, state.best, self.direction, self.min_delta):
            return StoppingState(best=float(metric)), False
        bad = state.bad_evaluations + 1
        state = StoppingState(best=state.best, bad_evaluations=bad)
        return state, self.verdict(state)

    def verdict(self, state: StoppingState) -> bool:
        """Whether a run with this state has ended."""
        return state.bad_evaluations >= self.patience
