"""SF203: the last, short window is never stepped."""

from __future__ import annotations

from collections import defaultdict

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import WindowTally, is_homogeneous
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule, Site
from surefoot.sanitizer.state import OptimizerState

MOST_DROPPED = 1000


class _Windows:
    """Windows of one optimizer."""

    def __init__(self) -> None:
        self.tally = WindowTally()
        self.cleared = 0
        """Backward passes of the open window whose gradients an earlier call has cleared."""
        self.dropped: list[tuple[int, Site, Site]] = []
        """Size of each dropped window, its last line, and where it was cleared."""

    def drop(self, optimizer: OptimizerState, site: Site) -> None:
        """The gradients of the open window are gone; a window of another line is no tail."""
        pending = optimizer.window[min(self.cleared, len(optimizer.window)) :]
        # Another line's backward pass measures something: attributions, Fisher information.
        is_training = is_homogeneous(pending) and pending[0].site in self.tally.sites
        if is_training and len(pending) < self.tally.usual and len(self.dropped) < MOST_DROPPED:
            self.dropped.append((len(pending), pending[-1].site, site))


class AccumTailDropped(Rule, page=__file__):
    """An epoch or the run ends with gradients accumulated since the last step()."""

    def setup(self) -> None:
        self.windows: dict[int, _Windows] = defaultdict(_Windows)

    def on_zero_grad(self, event: ev.ZeroGrad) -> None:
        keys = set() if event.inside_step else {state.key for state in event.parameters}
        for optimizer in self.trace.optimizers:
            if optimizer.window and any(s.key in keys for s in optimizer.parameters):
                windows = self.windows[optimizer.key]
                windows.drop(optimizer, event.site)
                windows.cleared = len(optimizer.window)

    def on_step_end(self, event: ev.StepEnd) -> None:
        windows = self.windows[event.optimizer.key]
        windows.tally.add(event.update)
        windows.cleared = 0

    def on_scaler_stepped(self, event: ev.ScalerStepped) -> None:
        if event.optimizer is not None:
            self.windows[event.optimizer.key].cleared = 0

    def on_run_ended(self, event: ev.RunEnded) -> None:
        for optimizer in self.trace.optimizers if self.trace.completed else ():
            self.windows[optimizer.key].drop(optimizer, NOWHERE)

    def findings(self) -> Findings:
        for windows in self.windows.values():
            dropped, usual = windows.dropped, windows.tally.usual
            if not dropped:
                continue
            size, site, cleared = dropped[-1]
            how = f"cleared at line {cleared.line}" if cleared.line else "left when the run ended"
            message = (
                f"{len(dropped)} window{'s' * (len(dropped) != 1)} of {size} instead of {usual}"
                f" micro-batches had no step: the gradients were {how}."
            )
            yield self.report(
                message,
                site,
                usual_window=usual,
                dropped_windows=len(dropped),
                dropped_micro_batches=sum(n for n, _, _ in dropped),
            )
