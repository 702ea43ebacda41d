"""SF601: probabilities go into a cross entropy that expects logits."""

from __future__ import annotations

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Finding, Site
from surefoot.sanitizer.rules.losses.loss_rule import SOFTMAX, LossRule, comes_from


class SoftmaxBeforeCe(LossRule, page=__file__):
    """The input of cross_entropy is the output of a softmax."""

    losses = ("cross_entropy",)

    def is_wrong(self, event: ev.LossCalled) -> bool | None:
        if event.target.is_floating_point() or event.input.dim() < 1:
            return None
        return is_probabilities(event.input)

    def describe(self, site: Site, count: int) -> Finding:
        message = (
            "The input of this cross_entropy is a softmax: non-negative and summing to 1 over the"
            f" classes, in all {count} calls looked at."
        )
        return self.report(message, site, calls_looked_at=count)


def is_probabilities(values: torch.Tensor) -> bool:
    """Whether `values` is a softmax over its classes, by its graph or else by its numbers."""
    if comes_from(values, SOFTMAX):
        return True
    if values.device.type != "cpu" or values.numel() == 0 or values.numel() > 1 << 22:
        return False
    classes = 1 if values.dim() > 1 else 0
    if values.shape[classes] < 2:
        return False
    sample = values.detach()[:64].float() if values.dim() > 1 else values.detach().float()
    sums = sample.sum(classes)
    return bool((sample >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())
