"""SF607: the first loss is far from that of a guess."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace

LOW, HIGH = 0.6, 1.35


class InitLossOff(Rule):
    """First CE / log C outside about 0.6 to 1.35."""

    info = RuleInfo(
        code="SF607",
        slug="init-loss-off",
        certainty=Certainty.HEURISTIC,
        title="The first cross entropy is far from log(number of classes).",
        observes="The first mean cross entropy before any update, against log C. Quiet where"
        " weights were loaded before, for class weights, and for contrastive targets.",
        why="A fresh classifier should guess. Far above: the output layer is initialised too"
        " large, and the first updates only shrink it. Far below: a label leaks, or classes are"
        " miscounted.",
        example="nn.init.normal_(head.weight, std=1.0)",
        fix="Initialise the output layer small, and look at labels and number of classes.",
        source="https://karpathy.github.io/2019/04/25/recipe/ (verify loss @ init)",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.loaded = False
        self.done = False
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
        plain = event.options.get("reduction", "mean") == "mean"
        weighted = event.options.get("weight") is not None
        if (
            value is None
            or not math.isfinite(value)
            or classes < 2
            or not plain
            or weighted
            or self.loaded
        ):
            return
        if event.target.is_floating_point() or _is_contrastive(event.target, classes):
            return
        if not LOW <= value / math.log(classes) <= HIGH:
            self.found = event.site, value, classes

    def findings(self) -> Iterable[Finding]:
        if self.found is not None:
            site, value, classes = self.found
            yield self.report(
                f"The first loss is {value:.3g}; a guess over {classes} classes gives"
                f" {math.log(classes):.3g}.",
                site,
                evidence={"first_loss": value, "classes": classes, "guess": math.log(classes)},
            )


def _is_contrastive(target: torch.Tensor, classes: int) -> bool:
    return (
        target.dim() == 1
        and target.device.type == "cpu"
        and target.numel() == classes
        and bool((target == torch.arange(classes)).all())
    )
