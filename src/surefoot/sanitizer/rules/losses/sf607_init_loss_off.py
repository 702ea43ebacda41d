"""SF607: the first loss is far from that of a guess."""

from __future__ import annotations

import math

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Findings, Rule, Site

LOW, HIGH = 0.6, 1.35
"""Of log(number of classes)."""


class InitLossOff(Rule, page=__file__):
    """The first mean cross entropy over log(number of classes) is outside 0.6 to 1.35."""

    def setup(self) -> None:
        self.loaded = self.done = False
        self.found: tuple[Site, float, int] | None = None

    def on_state_restored(self, event: ev.StateRestored) -> None:
        self.loaded = True

    def on_loaded(self, event: ev.Loaded) -> None:
        self.loaded = True

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if self.done or event.name != "cross_entropy" or not event.grad_enabled:
            return
        if self.trace.updates or event.input.grad_fn is None:
            return
        self.done = True
        value, classes = (
            graph.number(event.output),
            event.input.shape[min(1, event.input.dim() - 1)],
        )
        is_mean = event.options.get("reduction", "mean") == "mean"
        is_weighted = event.options.get("weight") is not None
        if value is None or not math.isfinite(value) or classes < 2:
            return
        if self.loaded or not is_mean or is_weighted or event.target.is_floating_point():
            return
        is_far = not LOW <= value / math.log(classes) <= HIGH
        if is_far and not _is_contrastive(event.target, classes):
            self.found = event.site, value, classes

    def findings(self) -> Findings:
        if self.found is not None:
            site, value, classes = self.found
            guess = math.log(classes)
            yield self.report(
                f"The first loss is {value:.3g}; a guess over {classes} classes gives {guess:.3g}.",
                site,
                first_loss=value,
                classes=classes,
                guess=guess,
            )


def _is_contrastive(target: torch.Tensor, classes: int) -> bool:
    """Whether each row's own column, or the first one, is the positive."""
    if target.dim() != 1 or target.device.type != "cpu" or target.numel() < 2:
        return False
    own = target.numel() == classes and bool((target == torch.arange(classes)).all())
    return own or not bool(target.any())
