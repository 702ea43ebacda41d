"""What is done about a spike of the loss or of the gradient norm: told, skipped, or rolled back.

It judges numbers that are the same on every rank, so every rank decides alike; its statistics are
part of the run's state. It touches no weight and no data: the optimizer skips on the device, and
the run rolls back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from surefoot.core.errors import SpikeError
from surefoot.core.reports import Event, StepReport
from surefoot.core.spikes import LOSS_RULE, NORM_RULE, STRIDE, Spike, SpikeWindow


class SpikePolicy(Enum):
    """What to do about a spike."""

    LOG = "log"
    """It is an event, and the run goes on."""
    SKIP = "skip"
    """An update whose gradient norm is one is not applied; a spike of the loss alone is told."""
    ROLL_BACK = "roll-back"
    """The run goes back behind the updates before it and leaves windows of data out."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """Where a run goes back to, and which windows it then leaves out."""

    spike_window: int
    """The window of the spike, as `StepReport.window` counts."""
    last_step: int
    """A checkpoint to go back to holds at most so many updates."""
    last_window: int
    """The last window that stays; windows behind it are undone."""
    num_left_out: int
    """So many windows behind it are left out."""

    @property
    def left_out(self) -> range:
        """Numbers of the windows that are left out."""
        return range(self.last_window + 1, self.last_window + 1 + self.num_left_out)


class RolledBack(Exception):
    """The run is to go back. No error: whoever drives the updates catches it."""

    def __init__(self, roll_back: RollBack) -> None:
        super().__init__(f"back to window {roll_back.last_window}")
        self.roll_back = roll_back


@dataclass(frozen=True, slots=True)
class SpikeSettings:
    """How a run answers spikes."""

    policy: SpikePolicy = SpikePolicy.LOG
    budget: int = 10
    """Spikes in the whole run that are skipped or rolled back before the run stops."""
    num_rolled_back: int = 100
    """Updates before the spike that are undone with it."""
    num_left_out: int = 200
    """Windows of data that are left out then, in place of those that are undone and more."""


class SpikeGuard:
    """Judges the finite updates of a run, in order, each exactly once."""

    def __init__(self, settings: SpikeSettings = SpikeSettings()) -> None:
        self.settings = settings
        self.loss = SpikeWindow(LOSS_RULE)
        self.norm = SpikeWindow(NORM_RULE)
        self.num_acted = 0
        self.roll_backs: list[RollBack] = []
        # Values that are no spikes for certain wait, and enter the windows many at once: what runs
        # between two updates is cold, and costs several times what it does in a row.
        self._waiting_losses: list[float] = []
        self._waiting_norms: list[float] = []
        self._calm_loss = self._calm_norm = 0.0

    @property
    def sets_limits(self) -> bool:
        """Whether an update may be skipped for its norm."""
        return self.settings.policy is SpikePolicy.SKIP

    def norm_limit(self, *, in_flight: bool) -> float:
        """An update with a gradient norm at or above it is not applied.

        Args:
            in_flight: whether the update before the next one is still to be judged.
        """
        if not self.sets_limits:
            return math.inf
        self._enter_waiting()
        return self.norm.limit(in_flight=in_flight)

    def pass_over(self) -> None:
        """An update that was not finite, or had nothing to learn from."""
        self._enter_waiting()
        self.loss.pass_over()
        self.norm.pass_over()

    def judge(self, report: StepReport) -> Event | None:
        """Takes a finite update; returns the event that a spike is.

        Raises:
            SpikeError: the budget of spikes is spent.
        """
        loss, norm = report.loss, report.grad_norm
        if 0.0 < loss <= self._calm_loss and 0.0 < norm <= self._calm_norm:
            self._waiting_losses.append(loss)
            self._waiting_norms.append(norm)
            if len(self._waiting_losses) == STRIDE:
                self._enter_waiting()
                self._calm_loss, self._calm_norm = self.loss.calm(), self.norm.calm()
            return None
        self._enter_waiting()
        spikes = {"loss": self.loss.judge(loss), "grad_norm": self.norm.judge(norm)}
        self._calm_loss, self._calm_norm = self.loss.calm(), self.norm.calm()
        if all(spike is None for spike in spikes.values()):
            return None
        return self._answer(report, spikes)

    def _enter_waiting(self) -> None:
        """The bounds of what is calm no longer hold then."""
        if self._waiting_losses:
            self.loss.take_calm(self._waiting_losses)
            self.norm.take_calm(self._waiting_norms)
            self._waiting_losses.clear()
            self._waiting_norms.clear()
        self._calm_loss = self._calm_norm = 0.0

    def is_left_out(self, window: int) -> bool:
        """Whether a window lies where the run was rolled back."""
        return any(window in roll_back.left_out for roll_back in self.roll_backs)

    @contextmanager
    def remembering(self, roll_back: RollBack) -> Iterator[None]:
        """Inside, an older state is put back: what was acted on stays known, and `roll_back`."""
        num_acted, roll_backs = self.num_acted, [*self.roll_backs, roll_back]
        yield
        self.num_acted, self.roll_backs = num_acted, roll_backs

    def undo(self, event: Event) -> RollBack | None:
        """The way back that the event asks for, or None."""
        if event.kind != "spike" or self.settings.policy is not SpikePolicy.ROLL_BACK:
            return None
        window = int(str(event.data["window"]))
        before = 1 + self.settings.num_rolled_back
        return RollBack(
            spike_window=window,
            last_step=max(0, event.step - before),
            last_window=max(0, window - before),
            num_left_out=self.settings.num_left_out,
        )

    def _answer(self, report: StepReport, spikes: Mapping[str, Spike | None]) -> Event:
        found = {name: spike for name, spike in spikes.items() if spike is not None}
        policy = self.settings.policy
        acts = policy is SpikePolicy.ROLL_BACK or not report.applied
        if acts and self.num_acted >= self.settings.budget:
            raise self._spent(report)
        self.num_acted += acts
        signs = [
            f"{_NAMES[name]} {spike.value:.4g} ({spike.value / spike.median:.3g} x the median)"
            if spike.median > 0
            else f"{_NAMES[name]} {spike.value:.4g} (median {spike.median:.4g})"
            for name, spike in found.items()
        ]
        message = f"spike in update {report.step + (not report.applied)}: {', '.join(signs)}"
        if acts:
            message += f"; {'rolled back' if report.applied else 'not applied'}, "
            message += f"{self.settings.budget - self.num_acted} more allowed"
        if any(spike.new_level for spike in found.values()):
            message += "; so many in a row are a new level: the statistics start anew"
        data: dict[str, object] = {
            "window": report.window,
            "epoch": report.epoch,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "applied": report.applied,
            "policy": policy.value,
            "sample_ids": list(report.sample_ids),
            "limits": {name: spike.limit for name, spike in found.items()},
            "medians": {name: spike.median for name, spike in found.items()},
        }
        return Event("spike", report.step, message, data)

    def _spent(self, report: StepReport) -> SpikeError:
        return SpikeError(
            f"update {report.step + (not report.applied)} is a spike: loss {report.loss:.4g}, "
            f"gradient norm {report.grad_norm:.4g}",
            where=f"window {report.window}, epoch {report.epoch}",
            rule=f"the guard.spike_budget of {self.settings.budget} is spent",
            remedy="lower optimizer.lr, lengthen the warm-up, look at these samples; "
            "guard.spikes=log goes on whatever comes",
        )

    def state_dict(self) -> dict[str, Any]:
        self._enter_waiting()
        return {
            "loss": self.loss.state_dict(),
            "grad_norm": self.norm.state_dict(),
            "num_acted": self.num_acted,
            "roll_backs": [asdict(roll_back) for roll_back in self.roll_backs],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting_losses.clear()
        self._waiting_norms.clear()
        self._calm_loss = self._calm_norm = 0.0
        self.loss.load_state_dict(state["loss"])
        self.norm.load_state_dict(state["grad_norm"])
        self.num_acted = int(state["num_acted"])
        self.roll_backs = [RollBack(**fields) for fields in state["roll_backs"]]


_NAMES = {"loss": "loss", "grad_norm": "gradient norm"}
