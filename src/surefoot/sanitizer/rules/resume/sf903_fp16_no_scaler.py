"""SF903: float16 gradients underflow, because the loss is not scaled."""

from __future__ import annotations

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import NOWHERE, Certainty, Findings, Rule, Site

LEAST = 3
UNDERFLOW = 0.05
SAMPLE = 4096
FIRST = 8


class Fp16NoScaler(Rule, page=__file__):
    """A forward under float16 autocast, an unscaled loss, and gradients that are exactly zero."""

    def setup(self) -> None:
        self.half_forward = False
        self.unscaled = 0
        self.scaled = 0
        self.site: Site = NOWHERE
        self.shares: list[float] = []

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if event.grad_enabled:
            self.half_forward = event.autocast is torch.float16

    def on_backward_end(self, event: ev.BackwardEnd) -> None:
        if not self.half_forward or not event.changed:
            return
        if any(state.scale_pending for state in event.changed) or len(self.trace.scalers):
            self.scaled += 1
            return
        self.unscaled += 1
        self.site = event.site
        n = self.unscaled
        if n <= FIRST or n & (n - 1) == 0:
            self._measure(event)

    def _measure(self, event: ev.BackwardEnd) -> None:
        zero = total = 0
        for state in event.changed:
            tensor = state.ref()
            gradient = None if tensor is None else tensor.grad
            if gradient is None or gradient.is_sparse or gradient.dim() < 2:
                continue
            rows = gradient.detach().reshape(gradient.shape[0], -1)[:SAMPLE]
            # A whole row of zeros is a dead unit or an unused token, not underflow.
            live = rows[(rows != 0).any(1)]
            zero += int((live == 0).sum())
            total += live.numel()
        if total:
            self.shares.append(zero / total)

    def findings(self) -> Findings:
        if self.unscaled < LEAST or self.scaled:
            return
        highest = max(self.shares, default=0.0)
        underflows = highest >= UNDERFLOW
        message = (
            f"{self.unscaled} backward passes under float16 autocast had no loss scale; up to"
            f" {highest:.1%} of the gradient values in live rows were exactly zero."
        )
        yield self.report(
            message,
            self.site,
            certainty=Certainty.STRONG if underflows else Certainty.HEURISTIC,
            backward_passes=self.unscaled,
            zero_shares=self.shares[:20],
        )
