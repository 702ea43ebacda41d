"""SF603: logits go into a loss that expects log-probabilities."""

from __future__ import annotations

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Finding, Site
from surefoot.sanitizer.rules.losses.loss_rule import LossRule, comes_from

MAX_LOGSUMEXP = 0.05
"""Distance of log(sum of exp) over the classes from 0 that rounding explains."""
LOGITS = ("Addmm", "Mm", "Bmm", "Convolution", "Linear")


class NllOnLogits(LossRule, page=__file__):
    """The input of nll_loss is not normalised."""

    losses = ("nll_loss",)

    def setup(self) -> None:
        super().setup()
        self.worst = self.lowest = 0.0

    def is_wrong(self, event: ev.LossCalled) -> bool | None:
        values = event.input
        if values.device.type != "cpu":
            return comes_from(values, LOGITS)
        if values.numel() == 0 or values.numel() > 1 << 22:
            return None
        total = torch.logsumexp(values.detach().float(), dim=1 if values.dim() > 1 else 0)
        off = float(total.abs().max())
        self.worst = max(self.worst, off)
        self.lowest = min(self.lowest, graph.number(event.output) or 0.0)
        # Probabilities, the other common mistake, sum to more than 1 too.
        return off > MAX_LOGSUMEXP

    def describe(self, site: Site, count: int) -> Finding:
        below = f"; the loss fell to {self.lowest:.3g}" if self.lowest < 0 else ""
        message = (
            "The input of nll_loss is not log-probabilities: logsumexp over the classes is up to"
            f" {self.worst:.3g} away from 0 in all {count} calls looked at{below}."
        )
        return self.report(
            message, site, calls_looked_at=count, logsumexp=self.worst, loss=self.lowest
        )
