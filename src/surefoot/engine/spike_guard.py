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
from surefoot.core.reports import StepReport
from surefoot.core.spikes import LOSS_RULE, NORM_RULE, Spike, SpikeWindow


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
class SpikeVerdict:
    """What is done about the spike of an update."""

    spikes: Mapping[str, Spike]
    """Of `loss`, of `grad_norm` or of both."""
    policy: SpikePolicy
    applied: bool
    """Whether the weights have moved."""
    num_left: int | None
    """So many more may be acted on; None where this one is only told."""
    roll_back: RollBack | None = None
    """Where the run goes back to."""

    @property
    def signs(self) -> str:
        """How far the values stand out, for people."""
        return ", ".join(
            f"{_NAMES[name]} {spike.value:.4g} ({spike.value / spike.median:.3g} x the median)"
            if spike.median > 0
            else f"{_NAMES[name]} {spike.value:.4g} (median {spike.median:.4g})"
            for name, spike in self.spikes.items()
        )

    @property
    def answer(self) -> str:
        """What follows, for people; empty where nothing does."""
        text = ""
        if self.num_left is not None:
            done = "rolled back" if self.applied else "not applied"
            text = f"; {done}, {self.num_left} more allowed"
        if any(spike.new_level for spike in self.spikes.values()):
            text += "; so many in a row are a new level: the statistics start anew"
        return text


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

    @property
    def sets_limits(self) -> bool:
        """Whether an update may be skipped for its norm."""
        return self.settings.policy is SpikePolicy.SKIP

    def norm_limit(self, *, in_flight: bool) -> float:
        """An update with a gradient norm at or above it is not applied.

        Args:
            in_flight: whether the update before the next one is still to be judged.
        """
        return self.norm.limit(in_flight=in_flight) if self.sets_limits else math.inf

    def pass_over(self) -> None:
        """An update that was not finite, or had nothing to learn from."""
        self.loss.judge(math.nan)
        self.norm.judge(math.nan)

    def judge(self, report: StepReport) -> SpikeVerdict | None:
        """Takes a finite update; returns what is done about it where it is a spike.

        Raises:
            SpikeError: the budget of spikes is spent.
        """
        loss, norm = self.loss.judge(report.loss), self.norm.judge(report.grad_norm)
        if loss is None and norm is None:
            return None
        policy, num_left = self.settings.policy, None
        if policy is SpikePolicy.ROLL_BACK or not report.applied:
            if self.num_acted >= self.settings.budget:
                raise self._spent(report)
            self.num_acted += 1
            num_left = self.settings.budget - self.num_acted
        found = {"loss": loss, "grad_norm": norm}
        spikes = {name: spike for name, spike in found.items() if spike is not None}
        back = self._way_back(report) if policy is SpikePolicy.ROLL_BACK else None
        return SpikeVerdict(spikes, policy, report.applied, num_left, back)

    def is_left_out(self, window: int) -> bool:
        """Whether a window lies where the run was rolled back."""
        return any(window in roll_back.left_out for roll_back in self.roll_backs)

    @contextmanager
    def remembering(self, roll_back: RollBack) -> Iterator[None]:
        """Inside, an older state is put back: what was acted on stays known, and `roll_back`."""
        num_acted, roll_backs = self.num_acted, [*self.roll_backs, roll_back]
        yield
        self.num_acted, self.roll_backs = num_acted, roll_backs

    def _way_back(self, report: StepReport) -> RollBack:
        before = 1 + self.settings.num_rolled_back
        return RollBack(
            spike_window=report.window,
            last_step=max(0, report.step - before),
            last_window=max(0, report.window - before),
            num_left_out=self.settings.num_left_out,
        )

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
        return {
            "loss": self.loss.state_dict(),
            "grad_norm": self.norm.state_dict(),
            "num_acted": self.num_acted,
            "roll_backs": [asdict(roll_back) for roll_back in self.roll_backs],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loss.load_state_dict(state["loss"])
        self.norm.load_state_dict(state["grad_norm"])
        self.num_acted = int(state["num_acted"])
        self.roll_backs = [RollBack(**fields) for fields in state["roll_backs"]]


_NAMES = {"loss": "loss", "grad_norm": "gradient norm"}
