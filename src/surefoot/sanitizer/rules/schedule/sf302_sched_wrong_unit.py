"""SF302: the schedule counts in another unit than the loop steps it."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, StepLR

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.rounds import Rounds
from surefoot.sanitizer.rules.base import Findings, Rule
from surefoot.sanitizer.state import SchedulerState

LEAST_STEPS = 8
LEAST_STEPS_AFTER_TURN = 5
"""Steps from which a cosine that was passed and rises again is told."""
LEAST_REPEATS = 3
REPEATED_SHARE = 0.4
"""Share of steps that had no update since the step before: nearly a half when each is doubled."""
UPDATES_PER_STEP = 3
"""Updates per step of a schedule that is clearly not stepped per update."""
PAST = 1.5
"""A horizon passed by this factor is not a rounding error."""
SHORT = 0.2
"""A run that uses less than this share of a horizon never sees the schedule."""
SHORT_IN_UPDATES = 0.5
"""The same where the horizon is just the number of updates."""
FITS = 0.05
"""Relative distance of a number from a horizon that it stands for."""
EACH = 0.9
"""Share of the updates (or micro-batches) from which steps were made at each."""
LEAST_EPOCHS = 2
STEEP_DECAY = 0.95
"""A factor below this is meant per epoch."""
HALVED = 0.5
TINY = 1e-3
"""A rate below this share of the highest trains nothing any more."""
MOSTLY = 0.5
HORIZONS = ("T_max", "total_steps", "total_iters")


class _Schedule:
    """What was seen of one scheduler."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        scheduler: Any = state.ref()
        self.horizon_name, self.horizon = _horizon(scheduler)
        self.gamma, self.decay_every, self.last_milestone = _decay(scheduler)
        self.first_rate: float | None = None
        self.rate = self.peak = 0.0
        self.direction = self.turns = self.rises = 0
        self.at_zero = self.tiny = self.below_zero = 0
        self.repeats = 0
        """Steps with no update since the step before."""
        self.stepped_at = (-1, -1)

    @property
    def steps(self) -> int:
        return self.state.steps

    @property
    def updates(self) -> int:
        return self.state.updates

    def count_repeat(self) -> None:
        """Takes up a step that the user's own line made."""
        optimizer = self.state.optimizer
        if optimizer is None:
            return
        now = optimizer.steps, optimizer.skipped
        # Winding a fresh scheduler forward comes before its first update.
        self.repeats += now == self.stepped_at and self.updates > 0
        self.stepped_at = now

    def move(self, before: float, after: float) -> None:
        """Takes up how a step changed the rate."""
        direction = (after > before) - (after < before)
        self.turns += direction > 0 and self.direction < 0
        self.direction = direction or self.direction
        self.rises += direction > 0
        if self.first_rate is None:
            self.first_rate = before
        self.rate, self.peak = after, max(self.peak, before, after)
        self.at_zero += after == 0.0
        self.tiny += after < TINY * self.peak
        self.below_zero += after < 0.0

    def fits(self, number: int) -> bool:
        """Whether the horizon was counted in the unit of this number."""
        return bool(self.horizon) and abs(number - self.horizon) <= FITS * self.horizon

    # -- what is wrong, in a sentence; empty where nothing is --------------------------------------

    def repeated(self) -> str:
        if self.repeats < max(LEAST_REPEATS, REPEATED_SHARE * self.steps):
            return ""
        return (
            f"{self.repeats} of {self.steps} steps of {self.state} had no update of its optimizer"
            " since the step before: it runs ahead of the updates."
        )

    def went_below_zero(self) -> str:
        if not self.below_zero:
            return ""
        return (
            f"{self.state} gave a learning rate below 0 in {self.below_zero} of {self.steps} steps."
        )

    def per_micro_batch(self) -> str:
        assert self.state.optimizer is not None
        steps, updates = self.steps, self.updates
        micro = sum(n * count for n, count in self.state.optimizer.window_sizes.items())
        if steps < LEAST_STEPS or self.fits(steps) or not updates or micro <= updates:
            return ""
        if steps < PAST * updates or steps < EACH * micro:
            return ""
        return (
            f"{self.state} was stepped {steps} times for {updates} updates: once per micro-batch"
            " instead of once per update."
        )

    def passed(self) -> str:
        name, turns, steps = self.horizon_name, self.turns, self.steps
        least = LEAST_STEPS_AFTER_TURN if turns else LEAST_STEPS
        if not name or steps <= PAST * self.horizon or steps < least:
            return ""
        ends_in_constant = self.state.kind in ("LinearLR", "ConstantLR")
        long_past = name == "total_iters" and steps > 4 * self.horizon and not ends_in_constant
        if not long_past and not (name == "T_max" and turns):
            return ""
        turned = f"; the rate turned upwards {turns} times" * bool(turns)
        return f"{self.state} has {name}={self.horizon} but was stepped {steps} times{turned}."

    def hardly_used(self) -> str:
        name, steps, updates = self.horizon_name, self.steps, self.updates
        if updates < LEAST_STEPS or updates <= UPDATES_PER_STEP * steps:
            return ""
        short = name in HORIZONS[:2] and steps < SHORT * self.horizon
        short = short or (self.fits(updates) and steps <= SHORT_IN_UPDATES * self.horizon)
        if steps >= 2 and short:
            return (
                f"{self.state} has {name}={self.horizon} but was stepped only {steps} times in"
                f" {updates} updates: its horizon seems to count updates, and it is stepped per"
                " epoch."
            )
        if steps < LEAST_REPEATS:
            return ""
        if self.rises == steps:
            return (
                f"{self.state} raised the rate at each of its {steps} steps and the run was over:"
                f" it never got past its warm-up in {updates} updates."
            )
        first = self.first_rate or 0.0
        if self.state.kind == "LambdaLR" and EACH * first < self.rate < first:
            return (
                f"{self.state} lowered the rate by {1 - self.rate / first:.1%} in {steps}"
                f" steps and {updates} updates: its lambda seems to count updates, and it is"
                " stepped per epoch."
            )
        return ""

    def vanished(self) -> str:
        steps = self.steps
        if steps < LEAST_STEPS:
            return ""
        if self.at_zero > MOSTLY * steps:
            return f"{self.state} lay at a learning rate of 0 for {self.at_zero} of {steps} steps."
        if self.tiny > MOSTLY * steps:
            return (
                f"{self.state} lay below {TINY:g} of its highest rate for {self.tiny} of {steps}"
                " steps: it falls per step as if per epoch."
            )
        return ""

    def falls_within_epochs(self, length: float) -> str:
        """`length`: updates of an epoch, 0 where unknown."""
        per_update = self.steps >= LEAST_STEPS and self.steps >= EACH * self.updates
        if not per_update or not length or self.updates < LEAST_EPOCHS * length:
            return ""
        if 0 < self.last_milestone <= length:
            return (
                f"{self.state} has its last milestone at {self.last_milestone}, within the first"
                f" epoch of about {length:.0f} updates: it counts epochs and is stepped per update."
            )
        left = self.gamma ** (length / self.decay_every)
        is_steep = self.gamma <= STEEP_DECAY and self.decay_every <= MOSTLY * length
        if not self.last_milestone and is_steep and left <= HALVED:
            return (
                f"{self.state} was stepped at each of {self.updates} updates: the rate falls to"
                f" {left:.0%} within an epoch of about {length:.0f} updates."
            )
        return ""


class SchedWrongUnit(Rule, page=__file__):
    """The horizon of a scheduler does not fit the number of its steps."""

    def setup(self) -> None:
        self.schedules: dict[int, _Schedule] = {}
        self.rounds = self.use(Rounds)

    def on_scheduler_created(self, event: ev.SchedulerCreated) -> None:
        self.schedules[event.scheduler.key] = _Schedule(event.scheduler)

    def on_scheduler_step(self, event: ev.SchedulerStep) -> None:
        schedule = self.schedules[event.scheduler.key]
        if event.by_user:
            schedule.count_repeat()
        if event.before and event.after:
            schedule.move(event.before[0], event.after[0])

    def findings(self) -> Findings:
        for schedule in self.schedules.values():
            state = schedule.state
            if state.inner or state.optimizer is None:
                continue
            message = schedule.repeated() or self._misfit(schedule)
            if message:
                yield self.report(
                    message,
                    state.last_site if state.last_site.line else state.site,
                    scheduler_steps=state.steps,
                    optimizer_steps=schedule.updates,
                    horizon=schedule.horizon or None,
                    turns=schedule.turns,
                )

    def _misfit(self, schedule: _Schedule) -> str:
        kind = schedule.state.kind
        if "Plateau" in kind:
            return ""
        message = schedule.went_below_zero() or schedule.per_micro_batch()
        if message or "Restarts" in kind or "Cyclic" in kind:
            return message
        return (
            schedule.passed()
            or (schedule.hardly_used() if self.trace.completed else "")
            or schedule.vanished()
            or schedule.falls_within_epochs(self.rounds.length())
        )


def _decay(scheduler: Any) -> tuple[float, int, int]:
    """Factor of a step-wise decay, the steps from one to the next, and the last milestone or 0."""
    gamma = getattr(scheduler, "gamma", None)
    if isinstance(gamma, float) and 0 < gamma < 1:
        if isinstance(scheduler, MultiStepLR):
            return gamma, 1, max(scheduler.milestones, default=0)
        if isinstance(scheduler, StepLR):
            return gamma, scheduler.step_size, 0
        if isinstance(scheduler, ExponentialLR):
            return gamma, 1, 0
    return 1.0, 1, 0


def _horizon(scheduler: Any) -> tuple[str, int]:
    """Name and value of the number of steps that a scheduler is made for; 0 for none."""
    for name in HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 0:
            return name, value
    return "", 0
