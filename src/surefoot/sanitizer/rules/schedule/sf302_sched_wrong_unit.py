"""SF302: the schedule counts in another unit than the loop steps it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, StepLR

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.rounds import Rounds
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo
from surefoot.sanitizer.state import SchedulerState

LEAST_STEPS = 8
LEAST_PAST = 5
"""Steps from which a cosine that was passed and rises again is told."""
LEAST_REPEATS = 3
REPEATED = 0.4
"""Share of steps that had no update since the step before: nearly a half when each is doubled."""
STEEP = 3
"""Updates per step of a schedule that is clearly not stepped per update."""
PAST = 1.5
"""A horizon passed by this factor is not a rounding error."""
SHORT = 0.2
"""A run that uses less than this share of a horizon never sees the schedule."""
PART = 0.5
"""The same where the horizon is just the number of updates."""
FITS = 0.05
LEAST_EPOCHS = 2
STEEP_DECAY = 0.95
"""A factor below this is meant per epoch."""
HALVED = 0.5
TINY = 1e-3
"""A rate below this share of the highest trains nothing any more."""
HORIZONS = ("T_max", "total_steps", "total_iters")

NEARLY = 0.9


class SchedWrongUnit(Rule):
    """Horizon of the object against the number of L."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.horizons: dict[int, tuple[str, int]] = {}
        self.decays: dict[int, tuple[float, int, int]] = {}
        self.rounds = self.use(Rounds)
        self.turns: dict[int, int] = defaultdict(int)
        self.direction: dict[int, int] = defaultdict(int)
        self.at_zero: dict[int, int] = defaultdict(int)
        self.repeats: dict[int, int] = defaultdict(int)
        self.peak: dict[int, float] = defaultdict(float)
        self.tiny: dict[int, int] = defaultdict(int)
        self.rises: dict[int, int] = defaultdict(int)
        self.rates: dict[int, tuple[float, float]] = {}
        """By scheduler: the rate before its first step and after its latest."""
        self.below_zero: dict[int, int] = defaultdict(int)
        self.stepped_at: dict[int, tuple[int, int]] = {}
        self.outcome = "completed"

    def on_scheduler_created(self, event: ev.SchedulerCreated) -> None:
        horizon = _horizon(event.scheduler.ref())
        if horizon is not None:
            self.horizons[event.scheduler.key] = horizon
        decay = _decay(event.scheduler.ref())
        if decay is not None:
            self.decays[event.scheduler.key] = decay

    def on_scheduler_step(self, event: ev.SchedulerStep) -> None:
        if event.by_user:
            self._count_repeats(event.scheduler)
        if not event.before or not event.after:
            return
        key, before, after = event.scheduler.key, event.before[0], event.after[0]
        direction = (after > before) - (after < before)
        if direction > 0 and self.direction[key] < 0:
            self.turns[key] += 1
        if direction:
            self.direction[key] = direction
        self.rises[key] += direction > 0
        self.rates[key] = self.rates.get(key, (before, after))[0], after
        self.at_zero[key] += after == 0.0
        self.peak[key] = max(self.peak[key], before, after)
        self.tiny[key] += after < TINY * self.peak[key]
        self.below_zero[key] += after < 0.0

    def _count_repeats(self, state: SchedulerState) -> None:
        if state.optimizer is None:
            return
        updates, skipped = state.optimizer.steps, state.optimizer.skipped
        before = self.stepped_at.get(state.key)
        # Winding a fresh scheduler forward comes before its first update.
        if before == (updates, skipped) and updates > state.optimizer_steps_at_creation:
            self.repeats[state.key] += 1
        self.stepped_at[state.key] = updates, skipped

    def on_run_ended(self, event: ev.RunEnded) -> None:
        self.outcome = event.outcome

    def findings(self) -> Findings:
        for state in self.trace.schedulers:
            if state.inner or state.optimizer is None:
                continue
            message = self._repeated(state) or self._misfit(state)
            if message:
                yield self.report(
                    message,
                    state.last_site if state.last_site.line else state.site,
                    scheduler_steps=state.steps,
                    optimizer_steps=_updates(state),
                    horizon=self.horizons.get(state.key, ("", None))[1],
                    turns=self.turns[state.key],
                )

    def _repeated(self, state: SchedulerState) -> str:
        repeats = self.repeats[state.key]
        if repeats < LEAST_REPEATS or repeats < REPEATED * state.steps:
            return ""
        return (
            f"{repeats} of {state.steps} steps of {state} had no update of its optimizer since the"
            " step before: it runs ahead of the updates."
        )

    def _misfit(self, state: SchedulerState) -> str:
        if "Plateau" in state.kind:
            return ""
        below = self.below_zero[state.key]
        if below:
            return f"{state} gave a learning rate below 0 in {below} of {state.steps} steps."
        message = self._per_micro_batch(state)
        if message or "Restarts" in state.kind or "Cyclic" in state.kind:
            return message
        return (
            self._passed(state)
            or self._hardly_used(state)
            or self._vanished(state)
            or self._falls_within_epochs(state)
        )

    def _falls_within_epochs(self, state: SchedulerState) -> str:
        gamma, every, last = self.decays.get(state.key, (1.0, 1, 0))
        steps, updates, length = state.steps, _updates(state), self.rounds.length()
        per_update = steps >= LEAST_STEPS and steps >= 0.9 * updates
        if not per_update or not length or updates < LEAST_EPOCHS * length:
            return ""
        if last and last <= length:
            return (
                f"{state} has its last milestone at {last}, within the first epoch of about"
                f" {length:.0f} updates: it counts epochs and is stepped per update."
            )
        share = gamma ** (length / every)
        if not last and gamma <= STEEP_DECAY and every <= 0.5 * length and share <= HALVED:
            return (
                f"{state} was stepped at each of {updates} updates: the rate falls to {share:.0%}"
                f" within an epoch of about {length:.0f} updates."
            )
        return ""

    def _per_micro_batch(self, state: SchedulerState) -> str:
        assert state.optimizer is not None
        steps, updates = state.steps, _updates(state)
        micro = sum(n * c for n, c in state.optimizer.window_sizes.items())
        name, horizon = self.horizons.get(state.key, ("", 0))
        # A horizon that ends with the last step was counted in the unit of the steps.
        fits = bool(name) and abs(steps - horizon) <= FITS * horizon
        if steps < LEAST_STEPS or fits or not updates or micro <= updates:
            return ""
        if steps < PAST * updates or steps < 0.9 * micro:
            return ""
        return (
            f"{state} was stepped {steps} times for {updates} updates: once per micro-batch"
            " instead of once per update."
        )

    def _passed(self, state: SchedulerState) -> str:
        name, horizon = self.horizons.get(state.key, ("", 0))
        steps, turns = state.steps, self.turns[state.key]
        if not name or steps <= PAST * horizon or steps < (LEAST_PAST if turns else LEAST_STEPS):
            return ""
        ends_in_constant = state.kind in ("LinearLR", "ConstantLR")
        long_past = name == "total_iters" and steps > 4 * horizon and not ends_in_constant
        if not long_past and not (name == "T_max" and turns):
            return ""
        turned = f"; the rate turned upwards {turns} times" * bool(turns)
        return f"{state} has {name}={horizon} but was stepped {steps} times{turned}."

    def _hardly_used(self, state: SchedulerState) -> str:
        name, horizon = self.horizons.get(state.key, ("", 0))
        steps, updates = state.steps, _updates(state)
        if self.outcome != "completed" or updates < LEAST_STEPS or updates <= STEEP * steps:
            return ""
        counts_updates = bool(name) and abs(updates - horizon) <= FITS * horizon
        short = name in HORIZONS[:2] and steps < SHORT * horizon
        if steps >= 2 and (short or (counts_updates and steps <= PART * horizon)):
            return (
                f"{state} has {name}={horizon} but was stepped only {steps} times in {updates}"
                " updates: its horizon seems to count updates, and it is stepped per epoch."
            )
        if steps >= LEAST_REPEATS and self.rises[state.key] == steps:
            return (
                f"{state} raised the rate at each of its {steps} steps and the run was over: it"
                f" never got past its warm-up in {updates} updates."
            )
        first, last = self.rates.get(state.key, (0.0, 0.0))
        if state.kind == "LambdaLR" and steps >= LEAST_REPEATS and NEARLY * first < last < first:
            return (
                f"{state} lowered the rate by {1 - last / first:.1%} in {steps} steps and {updates}"
                " updates: its lambda seems to count updates, and it is stepped per epoch."
            )
        return ""

    def _vanished(self, state: SchedulerState) -> str:
        steps = state.steps
        if steps < LEAST_STEPS:
            return ""
        if self.at_zero[state.key] > 0.5 * steps:
            return (
                f"{state} lay at a learning rate of 0 for {self.at_zero[state.key]} of {steps}"
                " steps."
            )
        if self.tiny[state.key] > 0.5 * steps:
            return (
                f"{state} lay below {TINY:g} of its highest rate for {self.tiny[state.key]} of"
                f" {steps} steps: it falls per step as if per epoch."
            )
        return ""


def _updates(state: SchedulerState) -> int:
    """Updates of its optimizer since the scheduler was made."""
    assert state.optimizer is not None
    return state.optimizer.steps - state.optimizer_steps_at_creation


def _decay(scheduler: Any) -> tuple[float, int, int] | None:
    """Factor of a step-wise decay, the steps from one to the next, and the last milestone or 0."""
    gamma = getattr(scheduler, "gamma", None)
    if not isinstance(gamma, float) or not 0 < gamma < 1:
        return None
    if isinstance(scheduler, MultiStepLR):
        return gamma, 1, max(scheduler.milestones, default=0)
    if isinstance(scheduler, StepLR):
        return gamma, scheduler.step_size, 0
    return (gamma, 1, 0) if isinstance(scheduler, ExponentialLR) else None


def _horizon(scheduler: Any) -> tuple[str, int] | None:
    for name in HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 0:
            return name, value
    return None
