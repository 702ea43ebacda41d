"""The guard: what happens after a non-finite update, or a spike. It decides; observers only read.

It never changes a gradient or a weight: the optimizer has already left them alone on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from surefoot.core.errors import DataError, NonFiniteError
from surefoot.core.reports import Event, StepReport
from surefoot.engine.spike_guard import RollBack, SpikeGuard, SpikeVerdict

SMALLEST_LOSS_SCALE = 1.0
"""A loss scale that fell this far and still overflows is not the cause."""


class NonFinitePolicy(Enum):
    """What to do after a loss or gradient that is NaN or infinite."""

    STOP = "stop"
    SKIP = "skip"


class DecisionKind(Enum):
    """What was found in an update."""

    SKIP = "skip"
    """It was not applied: it was not finite, or there was nothing to learn."""
    OVERFLOW = "overflow"
    """fp16 overflowed: the loss scale falls."""
    NON_FINITE_LOSS = "non-finite-loss"
    """The loss was not finite, its gradient was."""
    SPIKE = "spike"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the guard has found in an update, and what follows."""

    kind: DecisionKind
    report: StepReport
    message: str
    spike: SpikeVerdict | None = None

    @property
    def roll_back(self) -> RollBack | None:
        """Where the run goes back to; None where it goes on."""
        return None if self.spike is None else self.spike.roll_back

    def event(self) -> Event:
        """The decision as observers are told of it."""
        return event_of(self.kind.value, self.report, self.message, self.spike)


@dataclass
class Guard:
    """Judges each update's report, in order, exactly once.

    An overflow under a dynamic loss scale is part of how fp16 works: the update is skipped and the
    scale halves, under either policy, until the scale reaches 1.

    Args:
        policy: stop the run, or skip the update and go on.
        skip_budget: skipped updates in the whole run after which `skip` stops too.
        dynamic_loss_scale: whether a dynamic loss scale is at work.
        optimizer_skips: whether the optimizer left the weights alone on a non-finite flag.
        spikes: judges the updates that are finite.
    """

    policy: NonFinitePolicy = NonFinitePolicy.STOP
    skip_budget: int = 10
    dynamic_loss_scale: bool = False
    optimizer_skips: bool = True
    spikes: SpikeGuard = field(default_factory=SpikeGuard)
    num_skipped: int = field(default=0, init=False)
    num_overflows: int = field(default=0, init=False)
    _num_clipped: int = field(default=0, init=False)
    """Since the fraction of them was last asked for, at the window `_counted_from`."""
    _counted_from: int = field(default=1, init=False)
    _weightless_since: int | None = field(default=None, init=False)
    """Epoch in which the current row of windows without weight began."""

    def judge(self, report: StepReport) -> Decision | None:
        """Returns what is decided about the update; None where it is like any other.

        Raises:
            NonFiniteError: the policy, or a spent budget, says stop.
            SpikeError: the budget of spikes is spent.
            DataError: a whole epoch held nothing to learn from.
        """
        if report.clipped:
            self._num_clipped += 1
        if report.weight == 0.0:
            self.spikes.pass_over()
            if self.spikes.is_left_out(report.window):
                return None
            self._refuse_weightless_epoch(report)
            message = "the window carries no weight: there is nothing to learn"
            return Decision(DecisionKind.SKIP, report, message)
        self._weightless_since = None
        if math.isfinite(report.loss) and math.isfinite(report.grad_norm):
            spike = self.spikes.judge(report)
            return None if spike is None else _about(spike, report)
        self.spikes.pass_over()
        if self._is_overflow(report):
            self.num_overflows += 1
            message = f"fp16 overflow at loss scale {report.loss_scale:g}"
            return Decision(DecisionKind.OVERFLOW, report, message)
        if self.policy is NonFinitePolicy.SKIP and self.num_skipped < self.skip_budget:
            self.num_skipped += 1
            left = self.skip_budget - self.num_skipped
            if report.applied:
                message = f"the loss is {report.loss}, its gradient finite; {left} more allowed"
                return Decision(DecisionKind.NON_FINITE_LOSS, report, message)
            message = f"non-finite update skipped; {left} more allowed"
            return Decision(DecisionKind.SKIP, report, message)
        raise self._error(report)

    def clip_fraction(self, window: int) -> float | None:
        """Share of clipped updates since it was last asked for.

        Args:
            window: number of the window that is about to be judged.
        """
        clipped, windows = self._num_clipped, window - self._counted_from
        self._num_clipped, self._counted_from = 0, window
        return clipped / windows if windows else None

    def _refuse_weightless_epoch(self, report: StepReport) -> None:
        # No update is made, so a horizon in steps would never be reached.
        if self._weightless_since is None:
            self._weightless_since = report.epoch + report.ends_epoch
        # The first of these epochs may have begun with windows that had a weight.
        if report.epoch + report.ends_epoch >= self._weightless_since + 2:
            raise DataError(
                "no window of a whole epoch carries any weight",
                where=f"window {report.window}, epoch {report.epoch}",
                rule="an epoch holds at least one item that the loss counts",
                remedy="look at the labels: are all of them the ignore index, or masked?",
            )

    def _is_overflow(self, report: StepReport) -> bool:
        return (
            self.dynamic_loss_scale
            and math.isfinite(report.loss)
            and report.loss_scale > SMALLEST_LOSS_SCALE
        )

    def _error(self, report: StepReport) -> NonFiniteError:
        spent = self.policy is NonFinitePolicy.SKIP
        if report.applied:
            weights = "the gradient was finite and has moved the weights"
        elif self.optimizer_skips:
            weights = "the weights are those before this update"
        else:
            weights = "the weights in memory are spoilt; the last checkpoint is whole"
        return NonFiniteError(
            f"update {report.step} is not finite: loss {report.loss}, gradient norm "
            f"{report.grad_norm}; {weights}",
            where=f"window {report.window}, epoch {report.epoch}, "
            f"samples {_few(report.sample_ids)}",
            rule=(
                f"the skip budget of {self.skip_budget} is spent"
                if spent
                else "guard.non_finite is `stop`"
            ),
            remedy="look at these samples; lower optimizer.lr, lengthen the warm-up or use bf16; "
            "guard.non_finite=skip goes on without them",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_skipped": self.num_skipped,
            "num_overflows": self.num_overflows,
            "clipped": [self._num_clipped, self._counted_from],
            "spikes": self.spikes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_skipped = state["num_skipped"]
        self.num_overflows = state["num_overflows"]
        self._num_clipped, self._counted_from = map(int, state["clipped"])
        self.spikes.load_state_dict(state["spikes"])


def _about(spike: SpikeVerdict, report: StepReport) -> Decision:
    number = report.step + (not report.applied)
    message = f"spike in update {number}: {spike.signs}{spike.answer}"
    return Decision(DecisionKind.SPIKE, report, message, spike)


def event_of(
    kind: str, report: StepReport, message: str, spike: SpikeVerdict | None = None
) -> Event:
    """The event of an update, with its numbers and samples."""
    data: dict[str, object] = {
        "window": report.window,
        "epoch": report.epoch,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
    }
    if spike is not None:
        data |= {"applied": spike.applied, "policy": spike.policy.value}
    data["sample_ids"] = list(report.sample_ids)
    if spike is not None:
        data["limits"] = {name: found.limit for name, found in spike.spikes.items()}
        data["medians"] = {name: found.median for name, found in spike.spikes.items()}
    return Event(kind, report.step, message, data)


def _few(ids: tuple[int, ...], most: int = 12) -> str:
    shown = ", ".join(map(str, ids[:most]))
    return f"[{shown}{', …' if len(ids) > most else ''}]"
