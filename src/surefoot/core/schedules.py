"""Learning-rate schedules: pure functions from updates completed to a multiplier of the peak rate.

A schedule holds no counter and knows no optimizer, no ranks and no units but updates. Symbols, in
every docstring: n updates completed (0 before the first update, which uses `schedule(0)`), W length
of the warm-up, T the horizon in updates, f the floor as a share of the peak.

The warm-up w(n) of all of them is s + (1 - s) (n + 1) / W, with s = `warmup_start`, default 0: the
first update never has a rate of zero. A decay reaches its floor at n = T, so that the last update
(n = T - 1) has a rate above it, and stays there.

`torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)` accepts all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from surefoot.core.errors import RequestError


class Undecided(Enum):
    """A named value for a moment that is decided later, such as the start of a cooldown."""

    UNDECIDED = "undecided"

    def __repr__(self) -> str:
        return "UNDECIDED"


UNDECIDED = Undecided.UNDECIDED

Shape = Literal["linear", "cosine", "sqrt"]


# No slots in this module: LambdaLR saves and restores the `__dict__` of its callable.
class Schedule(ABC):
    """A multiplier of the peak learning rate for each update; a pure function.

    One of your own inherits from this class, or is a plain function of the updates completed.

    >>> class Halving(Schedule):
    ...     def _multiplier(self, n: int) -> float:
    ...         return 0.5 ** (n // 100)
    >>> [Halving()(n) for n in (0, 99, 100, 250)]
    [1.0, 1.0, 0.5, 0.25]
    """

    @abstractmethod
    def _multiplier(self, n: int) -> float: ...

    def __call__(self, n: int) -> float:
        """Multiplier of the update before which `n` updates were completed.

        Raises:
            RequestError: `n` is negative.
        """
        if n < 0:
            raise RequestError(
                f"a schedule was called for update {n}", rule="updates completed are counted from 0"
            )
        return self._multiplier(n)

    def momentum(self, n: int) -> float | None:
        """Momentum of that update; None if the schedule does not set momentum."""
        return None

    @property
    def settled_at(self) -> int | Undecided:
        """First n from which the value is constant; `UNDECIDED` if not known yet."""
        return UNDECIDED


@dataclass(frozen=True)
class Constant(Schedule):
    """w(n) for n < W, then 1: the peak rate, after an optional warm-up.

    First value 1 (or 1/W); last value 1.

    >>> [Constant()(n) for n in (0, 1, 10**6)]
    [1.0, 1.0, 1.0]
    >>> [Constant(warmup=4)(n) for n in (0, 1, 2, 3, 4)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    warmup: int = 0
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, self.warmup_start)

    def _multiplier(self, n: int) -> float:
        return _warmed(n, self.warmup, self.warmup_start)

    @property
    def settled_at(self) -> int:
        return max(0, self.warmup - 1)


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Linear warm-up, then half a cosine down to the floor.

    n < W: w(n)
    W <= n < T: f + (1 - f) (1 + cos(pi (n - W) / (T - W))) / 2
    n >= T: f

    First value 1/W (1 where W = 0), 1 at n = W - 1 and n = W, last value f, reached at n = T.
    Source: SGDR, arXiv:1608.03983, eq. 5, one cycle; floor 0.1 as in GPT-3, arXiv:2005.14165,
    appendix B. Equal to torch's SequentialLR of LinearLR(start_factor=1/W, total_iters=W - 1) and
    CosineAnnealingLR(T_max=T - W, eta_min=f peak) with milestone W, up to T; beyond T torch's
    rises. For W <= n <= T and f = 0 it is transformers' get_cosine_schedule_with_warmup, whose
    warm-up n / W starts at zero instead, and which has no floor.

    >>> s = WarmupCosine(warmup=10, total=110, floor=0.1)
    >>> [round(s(n), 4) for n in (0, 9, 10, 60, 110, 10**6)]
    [0.1, 1.0, 1.0, 0.55, 0.1, 0.1]
    """

    warmup: int
    total: int
    floor: float = 0.1
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, self.warmup_start)
        _check_decay(self.warmup, self.total, self.floor)

    def _multiplier(self, n: int) -> float:
        if n < self.warmup:
            return _warmed(n, self.warmup, self.warmup_start)
        return _fall(n, self.warmup, self.total - self.warmup, self.floor, "cosine")

    @property
    def settled_at(self) -> int:
        return self.total


@dataclass(frozen=True)
class WarmupLinear(Schedule):
    """Linear warm-up, then a straight line down to the floor.

    n < W: w(n)
    W <= n < T: f + (1 - f) (T - n) / (T - W)
    n >= T: f

    First value 1/W (1 where W = 0), last value f, reached at n = T.
    With f = 0 and n >= W it is transformers' get_linear_schedule_with_warmup.

    >>> s = WarmupLinear(warmup=2, total=10)
    >>> [s(n) for n in (0, 1, 2, 6, 9, 10, 11)]
    [0.5, 1.0, 1.0, 0.5, 0.125, 0.0, 0.0]
    """

    warmup: int
    total: int
    floor: float = 0.0
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, self.warmup_start)
        _check_decay(self.warmup, self.total, self.floor)

    def _multiplier(self, n: int) -> float:
        if n < self.warmup:
            return _warmed(n, self.warmup, self.warmup_start)
        return _fall(n, self.warmup, self.total - self.warmup, self.floor, "linear")

    @property
    def settled_at(self) -> int:
        return self.total


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """Linear warm-up, then the inverse square root of the number of updates.

    n < W: w(n)
    n >= W: sqrt(W / n)

    First value 1/W, 1 at n = W; no last value, it decreases for ever.
    Source: Attention Is All You Need, arXiv:1706.03762, eq. 3, scaled so that the peak is 1 at W;
    it is transformers' get_inverse_sqrt_schedule for n >= W (its timescale at the default, W).

    >>> s = InverseSqrt(warmup=4)
    >>> [s(n) for n in (0, 3, 4, 16, 64)]
    [0.25, 1.0, 1.0, 0.5, 0.25]
    """

    warmup: int
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, self.warmup_start)
        _require(
            self.warmup >= 1,
            f"warmup={self.warmup}",
            "an inverse square root needs a warm-up of at least one update, its time scale",
        )

    def _multiplier(self, n: int) -> float:
        return (
            _warmed(n, self.warmup, self.warmup_start)
            if n < self.warmup
            else math.sqrt(self.warmup / n)
        )


@dataclass(frozen=True)
class StepDecay(Schedule):
    """factor ** floor(n / period), times the warm-up if there is one.

    First value 1 (or 1/W); no last value. It is torch's StepLR.

    >>> s = StepDecay(period=30, factor=0.1)
    >>> [round(s(n), 6) for n in (0, 29, 30, 59, 60, 90)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.001]
    """

    period: int
    factor: float = 0.1
    warmup: int = 0
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, self.warmup_start)
        _check_factor(self.factor)
        _require(self.period >= 1, f"period={self.period}", "a period is at least one update")

    def _multiplier(self, n: int) -> float:
        return _warmed(n, self.warmup, self.warmup_start) * self.factor ** (n // self.period)


@dataclass(frozen=True)
class MultiStep(Schedule):
    """factor ** (number of milestones <= n), times the warm-up if there is one.

    First value 1 (or 1/W), last value factor ** len(milestones) from the last milestone on. It is
    torch's MultiStepLR.

    >>> s = MultiStep(milestones=(30, 60, 80), factor=0.5)
    >>> [s(n) for n in (0, 29, 30, 60, 79, 80, 10**6)]
    [1.0, 1.0, 0.5, 0.25, 0.25, 0.125, 0.125]
    """

    milestones: tuple[int, ...]
    factor: float = 0.1
    warmup: int = 0
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, self.warmup_start)
        _check_factor(self.factor)
        rising = all(a < b for a, b in zip((0, *self.milestones), self.milestones, strict=False))
        _require(
            rising and bool(self.milestones),
            f"milestones={self.milestones}",
            "milestones are one or more updates, each later than the one before and than 0",
        )

    def _multiplier(self, n: int) -> float:
        passed = sum(milestone <= n for milestone in self.milestones)
        return _warmed(n, self.warmup, self.warmup_start) * self.factor**passed

    @property
    def settled_at(self) -> int:
        return max(self.milestones[-1], self.warmup - 1)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Up to the peak, then down below the start, while momentum moves in the opposite direction.

    With the annealing a(u, v, p) from u to v, which is v + (u - v) (1 + cos(pi p)) / 2 for `cos`
    and u + (v - u) p for `linear`:

    n <= R - 1: a(1/d, 1, n / (R - 1))
    n > R - 1: a(1, 1/(d D), (n - R + 1) / (T - R)), and 1/(d D) from n = T - 1 on

    where R is `rise`, d `initial_divisor` and D `final_divisor`. Momentum is a(high, low, .) and
    then a(low, high, .) over the same spans. R may be fractional, as in torch.
    First value 1/d, 1 at n = R - 1, last value 1/(d D). Equal to torch's OneCycleLR (two phases),
    which raises beyond T. Source: super-convergence, arXiv:1708.07120.

    >>> s = OneCycle(total=100, rise=30)
    >>> [round(s(n), 6) for n in (0, 29, 64, 99, 10**6)]
    [0.04, 1.0, 0.500002, 4e-06, 4e-06]
    >>> [round(s.momentum(n), 4) for n in (0, 29, 99)]
    [0.95, 0.85, 0.95]
    """

    total: int
    rise: float
    anneal: Literal["cos", "linear"] = "cos"
    initial_divisor: float = 25.0
    final_divisor: float = 1e4
    momentum_low: float = 0.85
    momentum_high: float = 0.95
    cycle_momentum: bool = True

    def __post_init__(self) -> None:
        _require(
            1 < self.rise < self.total,
            f"rise={self.rise}, total={self.total}",
            "the rise takes more than one update and ends before the horizon",
        )
        _require(
            self.initial_divisor >= 1 and self.final_divisor >= 1,
            f"initial_divisor={self.initial_divisor}, final_divisor={self.final_divisor}",
            "divisors are at least 1",
        )
        _require(
            0 <= self.momentum_low <= self.momentum_high < 1,
            f"momentum_low={self.momentum_low}, momentum_high={self.momentum_high}",
            "momenta lie in [0, 1), low before high",
        )

    def _at(self, n: int, start: float, peak: float, end: float) -> float:
        top = self.rise - 1
        if n <= top:
            return self._annealed(start, peak, n / top)
        return self._annealed(peak, end, min(1.0, (n - top) / (self.total - 1 - top)))

    def _annealed(self, start: float, end: float, progress: float) -> float:
        if self.anneal == "cos":
            return end + (start - end) / 2.0 * (math.cos(math.pi * progress) + 1)
        return (end - start) * progress + start

    def _multiplier(self, n: int) -> float:
        start = 1 / self.initial_divisor
        return self._at(n, start, 1.0, start / self.final_divisor)

    def momentum(self, n: int) -> float | None:
        if not self.cycle_momentum:
            return None
        return self._at(n, self.momentum_high, self.momentum_low, self.momentum_high)

    @property
    def settled_at(self) -> int:
        return self.total - 1


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """Linear warm-up, a stable phase at the peak, and a cooldown whose start may be decided later.

    With S the start of the cooldown, C its length and p = (n - S) / C:

    n < W: w(n)
    W <= n < S, or S undecided: 1
    S <= n < S + C: f + (1 - f) g(p)
    n >= S + C: f

    where g(p) is 1 - p (`linear`), (1 + cos(pi p)) / 2 (`cosine`) or 1 - sqrt(p) (`sqrt`).
    First value 1/W (1 where W = 0), last value f, reached at n = S + C.
    Sources: MiniCPM, arXiv:2404.06395; the shapes, arXiv:2405.18392.

    >>> s = WarmupStableDecay(warmup=2, cooldown_start=6, cooldown=4)
    >>> [s(n) for n in (0, 1, 5, 6, 8, 10, 11)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    >>> WarmupStableDecay(warmup=2, cooldown_start=UNDECIDED, cooldown=4)(10**6)
    1.0
    """

    warmup: int
    cooldown_start: int | Undecided
    cooldown: int
    floor: float = 0.0
    shape: Shape = "linear"
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup, self.warmup_start)
        _check_cooldown(self.cooldown_start, self.cooldown, self.floor)
        start = self.cooldown_start
        _require(
            isinstance(start, Undecided) or start >= self.warmup,
            f"warmup={self.warmup}, cooldown_start={start}",
            "the cooldown starts after the warm-up",
        )

    def _multiplier(self, n: int) -> float:
        start = self.cooldown_start
        if n < self.warmup or isinstance(start, Undecided) or n < start:
            return _warmed(n, self.warmup, self.warmup_start)
        return _fall(n, start, self.cooldown, self.floor, self.shape)

    @property
    def settled_at(self) -> int | Undecided:
        start = self.cooldown_start
        return start if isinstance(start, Undecided) else start + self.cooldown


@dataclass(frozen=True)
class ConstantCooldown(Schedule):
    """The peak rate, then a cooldown whose start may be decided later.

    With S the start of the cooldown, C its length: 1 for n < S, f + (1 - f) g((n - S) / C) for
    S <= n < S + C with g as in `WarmupStableDecay`, f for n >= S + C.

    First value 1, last value f, reached at n = S + C. Source: arXiv:2405.18392.

    >>> s = ConstantCooldown(cooldown_start=8, cooldown=4, shape="sqrt")
    >>> [s(n) for n in (0, 8, 9, 12, 13)]
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """

    cooldown_start: int | Undecided
    cooldown: int
    floor: float = 0.0
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        _check_cooldown(self.cooldown_start, self.cooldown, self.floor)

    def _multiplier(self, n: int) -> float:
        start = self.cooldown_start
        if isinstance(start, Undecided) or n < start:
            return 1.0
        return _fall(n, start, self.cooldown, self.floor, self.shape)

    @property
    def settled_at(self) -> int | Undecided:
        start = self.cooldown_start
        return start if isinstance(start, Undecided) else start + self.cooldown


def first_difference(before: Schedule, after: Schedule, until: int) -> int | None:
    """First n below `until` at which two schedules differ; None if they agree on all of them.

    If None, resuming at `until` with `after` does not change the past under `before`.

    >>> undecided = ConstantCooldown(UNDECIDED, cooldown=1)
    >>> first_difference(undecided, ConstantCooldown(cooldown_start=100, cooldown=50), until=100)
    >>> first_difference(undecided, ConstantCooldown(cooldown_start=90, cooldown=50), until=100)
    91
    """
    for n in range(until):
        if before(n) != after(n) or before.momentum(n) != after.momentum(n):
            return n
    return None


def _warmed(n: int, warmup: int, start: float) -> float:
    return start + (1.0 - start) * ((n + 1) / warmup) if n < warmup else 1.0


def _fall(n: int, start: int, length: int, floor: float, shape: Shape) -> float:
    # Past the end the floor is returned exactly: f + (1 - f) * 0 may differ from it, and the cosine
    # would rise again.
    if n >= start + length:
        return floor
    progress = (n - start) / length
    match shape:
        case "linear":
            remaining = (start + length - n) / length
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        case "sqrt":
            remaining = 1.0 - math.sqrt(progress)
    return floor + (1.0 - floor) * remaining


def _require(condition: bool, where: str, rule: str) -> None:
    if not condition:
        raise RequestError("the schedule is invalid", where=where, rule=rule)


def _check_warmup(warmup: int, start: float) -> None:
    _require(warmup >= 0, f"warmup={warmup}", "a warm-up is not negative")
    _require(0 <= start < 1, f"warmup_start={start}", "a warm-up starts in [0, 1) of the peak")


def _check_factor(factor: float) -> None:
    _require(0 < factor <= 1, f"factor={factor}", "a decay factor lies in (0, 1]")


def _check_decay(warmup: int, total: int, floor: float) -> None:
    _require(0 <= floor <= 1, f"floor={floor}", "a floor lies in [0, 1], a share of the peak")
    _require(total >= 1, f"total={total}", "the horizon is at least one update")
    _require(
        warmup <= total, f"warmup={warmup}, total={total}", "the warm-up ends within the horizon"
    )


def _check_cooldown(start: int | Undecided, cooldown: int, floor: float) -> None:
    _require(
        isinstance(start, Undecided) or start >= 1,
        f"cooldown_start={start}",
        "a cooldown starts after the first update",
    )
    _require(cooldown >= 1, f"cooldown={cooldown}", "a cooldown takes at least one update")
    _require(0 <= floor <= 1, f"floor={floor}", "a floor lies in [0, 1], a share of the peak")
