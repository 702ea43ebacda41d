"""SF502: weight decay of an adaptive optimizer is not decoupled."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, Site

ADAPTIVE = ("Adam", "NAdam", "RAdam", "Adamax")


class AdamL2(Rule, page=__file__):
    """Adam-like class with weight_decay and not decoupled."""

    def setup(self) -> None:
        self.found: dict[int, tuple[str, float, Site]] = {}

    def on_step_end(self, event: ev.StepEnd) -> None:
        optimizer = event.optimizer
        if optimizer.kind not in ADAPTIVE or optimizer.key in self.found:
            return
        for group in optimizer.groups():
            decay = group.get("weight_decay", 0)
            if decay and not group.get("decoupled_weight_decay") and len(self.found) < 100:
                self.found[optimizer.key] = optimizer.kind, float(decay), optimizer.site

    def findings(self) -> Findings:
        for kind, decay, site in self.found.values():
            yield self.report(
                f"{kind} with weight_decay={decay:g} is L2 regularisation, not weight decay.",
                site,
                weight_decay=decay,
            )
