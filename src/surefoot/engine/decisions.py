"""What follows from an evaluation: the best step, a drop of the rate, an early end.

Each decision is a pure function of a state and a metric; the states are part of the run's state, so
a resume decides the same. Nothing here touches a weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

from surefoot.core.errors import ModelError
from surefoot.core.reports import EvalReport, Event
from surefoot.core.stopping import Direction, is_improvement
from surefoot.state.run_state import Best


@dataclass(frozen=True, slots=True)
class WatchedMetric:
    """One metric of the first validation set, or of a named one (`set/metric`)."""

    name: str
    direction: Direction

    def value(self, reports: Sequence[EvalReport]) -> float:
        """The metric's value in these reports.

        Raises:
            ModelError: no report has it; those that are there are named.
        """
        for report in reports:
            for name in (self.name, self.name.removeprefix(f"{report.name}/")):
                if name in report.metrics:
                    return report.metrics[name]
        known = sorted({name for report in reports for name in report.metrics})
        raise ModelError(
            f"no validation set has the metric '{self.name}'",
            rule=f"the metrics are {', '.join(known)}",
            remedy="name one of these, as METRIC or SET/METRIC",
        )


class StatefulRule(Protocol):
    """A pure rule with a frozen, JSON-able state."""

    def begin(self) -> Any: ...

    def __call__(self, state: Any, metric: float) -> tuple[Any, Any]: ...

    def verdict(self, state: Any) -> Any: ...


class RuleState:
    """Holds the state of one pure rule between evaluations.

    Args:
        rule: `(state, metric) -> (state, verdict)`, or None for a rule that is off.
        watched: the metric it is shown.
        verdict: what holds before the first evaluation.
        read: makes a state from its JSON form.
    """

    def __init__(
        self,
        rule: StatefulRule | None,
        watched: WatchedMetric | None,
        verdict: Any,
        read: Callable[[Mapping[str, Any]], Any],
    ) -> None:
        self._rule = rule
        self.watched = watched
        """The metric it is shown; None for a rule that is off."""
        self._read = read
        self.state = rule.begin() if rule is not None else None
        self.verdict = verdict

    def show(self, reports: Sequence[EvalReport]) -> bool:
        """Applies the rule; returns whether its verdict changed."""
        if self._rule is None or self.watched is None:
            return False
        before = self.verdict
        self.state, self.verdict = self._rule(self.state, self.watched.value(reports))
        return bool(self.verdict != before)

    def state_dict(self) -> dict[str, Any]:
        held = None if self.state is None else self.state.as_json()
        return {"state": held, "verdict": self.verdict}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts a state back; a rule that is off now, or was off then, keeps its own start."""
        if self._rule is not None and state["state"] is not None:
            self.state = self._read(state["state"])
            self.verdict = self._rule.verdict(self.state)


class Decisions:
    """Looks at the reports of an evaluation and says whether the run ends.

    Args:
        best: the best value so far of `deciding`.
        deciding: the metric that tells the best step.
        plateau: may lower the rate.
        stopping: may end the run.
    """

    def __init__(
        self,
        best: Best,
        deciding: WatchedMetric,
        plateau: RuleState,
        stopping: RuleState,
    ) -> None:
        self.best = best
        self.deciding = deciding
        self.plateau = plateau
        self.stopping = stopping
        self._latest: tuple[int, float] | None = None
        self.is_best = False
        """Whether the latest evaluation is the best one so far."""

    def best_at(self, step: int) -> bool:
        """Whether `step` was evaluated, and is the best one so far."""
        return self.is_best and self._latest is not None and self._latest[0] == step

    def decided_at(self, step: int) -> dict[str, Any] | None:
        """The deciding metric as it was evaluated at `step`; None where it was not."""
        if self._latest is None or self._latest[0] != step:
            return None
        value = self._latest[1]
        return {
            "metric": self.deciding.name,
            "direction": self.deciding.direction,
            "value": value if isfinite(value) else None,
        }

    def __call__(
        self, step: int, reports: Sequence[EvalReport], tell: Callable[[Event], None]
    ) -> str | None:
        """Returns the reason to finish, or None; `tell` receives each decision as an event."""
        value = self.deciding.value(reports)
        self._latest = step, value
        self.is_best = is_improvement(value, self.best.value, self.deciding.direction)
        if self.is_best:
            self.best.value, self.best.step = value, step
        if self.plateau.show(reports):
            message = f"the metric stopped improving: the rate is now x {self.plateau.verdict:g}"
            tell(Event("plateau", step, message, {"multiplier": self.plateau.verdict}, time.time()))
        self.stopping.show(reports)
        reason = self.end()
        if reason is None:
            return None
        tell(Event("early-stop", step, reason, {}, time.time()))
        return reason

    def end(self) -> str | None:
        """Why the run ends by what the evaluations so far have shown, or None.

        After a resume too: a run that has ended does not train on, unless its rule was changed.
        """
        if not self.stopping.verdict:
            return None
        watched, state = self.stopping.watched, self.stopping.state
        assert watched is not None
        assert state is not None
        reason = f"early stopping: {watched.name} has not improved for {state.bad_evaluations} "
        reason += f"evaluation{'s' if state.bad_evaluations > 1 else ''}; best {state.best}"
        return f"{reason} at step {self.best.step}" if watched == self.deciding else reason
