"""Reduces the learning rate when a metric stops improving: a pure function of state and metric.

Holds no counter of its own: the state is a value and part of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from surefoot.core.errors import RequestError
from surefoot.core.stopping import Direction, is_improvement


@dataclass(frozen=True, slots=True)
class PlateauState:
    """State of `Plateau` between evaluations."""

    best: float | None = None
    """Best value so far; None before the first finite one."""
    bad_evaluations: int = 0
    """Evaluations without improvement since the best one, the last drop or the last cooldown."""
    cooldown_left: int = 0
    """Remaining evaluations that do not count as bad."""
    multiplier: float = 1.0

    def as_json(self) -> dict[str, Any]:
        """Plain data for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlateauState:
        """The state written by `as_json`."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Plateau:
    """Multiplies the rate by `factor` after `patience` evaluations without improvement.

    `plateau(state, metric) -> (state, multiplier)`; the multiplier starts at 1 and never falls
    below `floor`. An improvement is more than `min_delta` better than the best value so far; NaN
    and infinity never are. The drop comes at the `patience`-th bad evaluation. torch's
    ReduceLROnPlateau (threshold_mode="abs") accepts `patience` bad ones and drops at the next: its
    patience p is p + 1 here.

    >>> plateau = Plateau(direction="min", factor=0.5, patience=2)
    >>> state, multipliers = plateau.begin(), []
    >>> for loss in (1.0, 0.9, 0.9, 0.95, 0.9, 0.9):
    ...     state, multiplier = plateau(state, loss)
    ...     multipliers.append(multiplier)
    >>> multipliers
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    """

    direction: Direction
    factor: float = 0.1
    patience: int = 10
    min_delta: float = 0.0
    cooldown: int = 0
    """Evaluations after a drop that are ignored."""
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not (
            0 < self.factor < 1
            and self.patience >= 1
            and 0 <= self.min_delta < float("inf")
            and self.cooldown >= 0
            and 0 <= self.floor <= 1
        ):
            raise RequestError(
                "the plateau rule is invalid",
                where=repr(self),
                rule="0 < factor < 1, patience >= 1, min_delta and cooldown >= 0, 0 <= floor <= 1",
            )

    def begin(self) -> PlateauState:
        """The state before the first evaluation."""
        return PlateauState()

    def __call__(self, state: PlateauState, metric: float) -> tuple[PlateauState, float]:
        """The next state, and the multiplier of the rate from now on; NaN counts for nothing."""
        if math.isnan(metric):
            return state, self.verdict(state)
        if is_improvement(metric, state.best, self.direction, self.min_delta):
            state = replace(state, best=float(metric), bad_evaluations=0)
        else:
            state = replace(state, bad_evaluations=state.bad_evaluations + 1)
        if state.cooldown_left:
            state = replace(state, cooldown_left=state.cooldown_left - 1, bad_evaluations=0)
        if state.bad_evaluations >= self.patience:
            multiplier = max(self.floor, state.multiplier * self.factor)
            state = replace(
                state, multiplier=multiplier, cooldown_left=self.cooldown, bad_evaluations=0
            )
        return state, self.verdict(state)

    def verdict(self, state: PlateauState) -> float:
        """The multiplier of the rate in this state."""
        return state.multiplier
