"""SF203: the last, short window is never stepped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.windows import WindowTally, is_homogeneous
from surefoot.sanitizer.state import BackwardRecord, OptimizerState
from surefoot.sanitizer.trace import Trace


class AccumTailDropped(Rule):
    """An epoch or the run ends with gradients accumulated since the last S."""

    info = RuleInfo(
        code="SF203",
        slug="accum-tail-dropped",
        certainty=Certainty.STRONG,
        title="The last, short accumulation window is computed and thrown away.",
        observes="Gradients of a window shorter than the usual one that are cleared, or still"
        " there when the script ends by itself. Quiet for scripts that were stopped, and for"
        " backward passes of lines that no update used.",
        why="Those micro-batches are never learned from; with a fixed order it is always the same"
        " samples.",
        example="for i, batch in enumerate(loader):\n    (loss(batch) / 4).backward()\n"
        "    if (i + 1) % 4 == 0: optimizer.step(); optimizer.zero_grad()",
        fix="Step at the end of the epoch too, with the loss divided by that window's own length.",
        source="Follows from what zero_grad() and step() do.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
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

    def findings(self) -> Iterable[Finding]:
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
                evidence={
                    "usual_window": usual,
                    "dropped_windows": len(dropped),
                    "dropped_micro_batches": sum(n for n, _, _ in dropped),
                },
            )
