"""SF604: probabilities go into a divergence that expects log-probabilities."""

from __future__ import annotations

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Finding, Site
from surefoot.sanitizer.rules.losses.loss_rule import SOFTMAX, LossRule, comes_from

TOLERANCE = 0.01


class KlDivInputNotLog(LossRule, page=__file__):
    """The input of kl_div has positive values, or its exponentials sum to more than 1."""

    losses = ("kl_div",)

    def setup(self) -> None:
        super().setup()
        self.highest = 0.0

    def is_wrong(self, event: ev.LossCalled) -> bool | None:
        values = event.input
        if values.device.type != "cpu":
            return comes_from(values, SOFTMAX)
        if values.numel() == 0 or values.dim() == 0:
            return None
        plain = values.detach().float()
        highest = float(plain.max())
        self.highest = max(self.highest, highest)
        return highest > TOLERANCE or _sums_over_one(plain)

    def describe(self, site: Site, count: int) -> Finding:
        message = (
            f"The input of kl_div is not log-probabilities in all {count} calls looked at (highest"
            f" value {self.highest:.3g}; logarithms of probabilities are at most 0)."
        )
        return self.report(message, site, calls_looked_at=count, highest=self.highest)


def _sums_over_one(values: torch.Tensor) -> bool:
    """Whether the exponentials sum to more than 1 along every axis."""
    return min(float(values.exp().sum(a).max()) for a in range(values.dim())) > 1 + TOLERANCE
