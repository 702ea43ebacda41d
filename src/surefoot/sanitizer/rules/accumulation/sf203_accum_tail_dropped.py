"""SF203: the last, short window is never stepped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.windows import WindowTally, is_homogeneous
from surefoot.sanitizer.rules.base import NOWHERE, Findings, Rule, RuleInfo, Site
from surefoot.sanitizer.state import BackwardRecord, OptimizerState


class AccumTailDropped(Rule):
    """An epoch or the run ends with gradients accumulated since the last S."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.tallies: dict[int, WindowTally] = defaultdict(WindowTally)
        self.wiped: dict[int, int] = defaultdict(int)
        self.dropped: dict[int, list[tuple[int, Site, Site]]] = defaultdict(list)
        self.completed = False

    def on_zero_grad(self, event: ev.ZeroGrad) -> None:
        if event.inside_step:
            return
        keys = {state.key for state in event.parameters}
        for optimizer in self.trace.optimizers:
            # What an earlier call cleared in this window is gone already.
            already = min(self.wiped[optimizer.key], len(optimizer.window))
            pending = optimizer.window[already:]
            if not pending or not any(s.key in keys for s in optimizer.parameters):
                continue
            self.wiped[optimizer.key] = len(optimizer.window)
            dropped = self.dropped[optimizer.key]
            if self._is_tail(optimizer, pending) and len(dropped) < 1000:
                dropped.append((len(pending), pending[-1].site, event.site))

    def _is_tail(self, optimizer: OptimizerState, pending: Sequence[BackwardRecord]) -> bool:
        tally = self.tallies[optimizer.key]
        # Another line's backward pass measures something: attributions, Fisher information.
        is_training = is_homogeneous(pending) and pending[0].site in tally.sites
        return len(pending) < tally.usual and is_training

    def on_step_end(self, event: ev.StepEnd) -> None:
        key = event.optimizer.key
        self.tallies[key].add(event.update)
        self.wiped[key] = 0

    def on_scaler_stepped(self, event: ev.ScalerStepped) -> None:
        if event.optimizer is not None:
            self.wiped[event.optimizer.key] = 0

    def on_run_ended(self, event: ev.RunEnded) -> None:
        if event.outcome != "completed":
            return
        for optimizer in self.trace.optimizers:
            pending = optimizer.window[self.wiped[optimizer.key] :]
            if pending and self._is_tail(optimizer, pending):
                self.dropped[optimizer.key].append((len(pending), pending[-1].site, NOWHERE))

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            dropped = self.dropped[optimizer.key]
            if not dropped:
                continue
            usual = self.tallies[optimizer.key].usual
            size, site, cleared = dropped[-1]
            how = f"cleared at line {cleared.line}" if cleared.line else "left when the run ended"
            yield self.report(
                f"{len(dropped)} window{'s' * (len(dropped) != 1)} of {size} instead of {usual}"
                f" micro-batches had no step: the gradients were {how}.",
                site,
                usual_window=usual,
                dropped_windows=len(dropped),
                dropped_micro_batches=sum(n for n, _, _ in dropped),
            )
