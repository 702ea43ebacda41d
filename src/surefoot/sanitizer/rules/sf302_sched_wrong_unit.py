"""SF302: the schedule counts in another unit than the loop steps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.state import SchedulerState
from surefoot.sanitizer.trace import Trace

LEAST_STEPS = 8
PAST = 1.5
"""A horizon passed by this factor is not a rounding error."""
SHORT = 0.2
"""A run that uses less than this share of a horizon never sees the schedule."""
FITS = 0.05
HORIZONS = ("T_max", "total_steps", "total_iters")


class SchedWrongUnit(Rule):
    """Horizon of the object against the number of L."""

    info = RuleInfo(
        code="SF302",
        slug="sched-wrong-unit",
        certainty=Certainty.HEURISTIC,
        title="The schedule's horizon and the number of its steps do not fit.",
        observes="Steps of the scheduler against its horizon (T_max, total_iters, total_steps,"
        " milestones) and against the optimizer's steps; how often a rate turned round; how long"
        " it lay at zero. Quiet for warm restarts and runs that were stopped.",
        why="A schedule in epochs stepped per batch oscillates or ends early; one in batches"
        " stepped per epoch hardly moves.",
        example="scheduler = CosineAnnealingLR(optimizer, T_max=epochs)\n"
        "for batch in loader: ...; scheduler.step()",
        fix="Count the horizon in the unit in which scheduler.step() is called.",
        source="Follows from the formulas of torch.optim.lr_scheduler.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.horizons: dict[int, tuple[str, int]] = {}
        self.turns: dict[int, int] = defaultdict(int)
        self.direction: dict[int, int] = defaultdict(int)
        self.at_zero: dict[int, int] = defaultdict(int)
        self.outcome = "completed"

    def on_scheduler_created(self, event: ev.SchedulerCreated) -> None:
        horizon = _horizon(event.scheduler.ref())
        if horizon is not None:
            self.horizons[event.scheduler.key] = horizon

    def on_scheduler_step(self, event: ev.SchedulerStep) -> None:
        if not event.before or not event.after:
            return
        key, before, after = event.scheduler.key, event.before[0], event.after[0]
        direction = (after > before) - (after < before)
        if direction > 0 and self.direction[key] < 0:
            self.turns[key] += 1
        if direction:
            self.direction[key] = direction
        self.at_zero[key] += after == 0.0

    def on_run_ended(self, event: ev.RunEnded) -> None:
        self.outcome = event.outcome

    def findings(self) -> Iterable[Finding]:
        for state in self.trace.schedulers:
            if state.inner or state.optimizer is None or "Plateau" in state.kind:
                continue
            message = self._misfit(state)
            if message:
                updates = state.optimizer.steps - state.optimizer_steps_at_creation
                yield self.report(
                    message,
                    state.last_site if state.last_site.line else state.site,
                    evidence={
                        "scheduler_steps": state.steps,
                        "optimizer_steps": updates,
                        "horizon": self.horizons.get(state.key, ("", None))[1],
                        "turns": self.turns[state.key],
                    },
                )

    def _misfit(self, state: SchedulerState) -> str:
        assert state.optimizer is not None
        steps, key = state.steps, state.key
        updates = state.optimizer.steps - state.optimizer_steps_at_creation
        micro = sum(n * c for n, c in state.optimizer.window_sizes.items())
        name, horizon = self.horizons.get(key, ("", 0))
        # A horizon that ends with the last step was counted in the unit of the steps.
        fits = bool(name) and abs(steps - horizon) <= FITS * horizon
        if (
            steps >= LEAST_STEPS
            and not fits
            and updates
            and steps >= PAST * updates
            and steps >= 0.9 * micro
            and micro > updates
        ):
            return (
                f"{state} was stepped {steps} times for {updates} updates: once per micro-batch"
                " instead of once per update."
            )
        if "Restarts" in state.kind or "Cyclic" in state.kind:
            return ""
        if name and steps >= LEAST_STEPS and steps > PAST * horizon:
            turned = f"; the rate turned upwards {self.turns[key]} times" * bool(self.turns[key])
            if (name == "T_max" and self.turns[key]) or (
                name == "total_iters" and horizon * 4 < steps
            ):
                if name == "total_iters" and state.kind in ("LinearLR", "ConstantLR"):
                    return ""
                return f"{state} has {name}={horizon} but was stepped {steps} times{turned}."
        ended = self.outcome == "completed" and updates >= LEAST_STEPS and steps >= 2
        if ended and name in HORIZONS[:2] and steps < SHORT * horizon and updates > 3 * steps:
            return (
                f"{state} has {name}={horizon} but was stepped only {steps} times in {updates}"
                " updates: its horizon seems to count updates, and it is stepped per epoch."
            )
        if self.at_zero[key] > 0.5 * steps and steps >= LEAST_STEPS:
            return f"{state} lay at a learning rate of 0 for {self.at_zero[key]} of {steps} steps."
        return ""


def _horizon(scheduler: Any) -> tuple[str, int] | None:
    for name in HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and value > 0:
            return name, value
    return None
