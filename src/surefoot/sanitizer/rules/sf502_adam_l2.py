"""SF502: weight decay of an adaptive optimizer is not decoupled."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace

ADAPTIVE = ("Adam", "NAdam", "RAdam", "Adamax")


class AdamL2(Rule):
    """Adam-like class with weight_decay and not decoupled."""

    info = RuleInfo(
        code="SF502",
        slug="adam-l2",
        certainty=Certainty.CONVENTION,
        title="Adam with weight_decay adds L2 to the adaptive gradient.",
        observes="Adam, NAdam, RAdam or Adamax with weight_decay > 0. Quiet for"
        " decoupled_weight_decay=True.",
        why="The decay is divided by the gradient's running size, so weights with large gradients"
        " are hardly decayed.",
        example="torch.optim.Adam(model.parameters(), weight_decay=0.05)",
        fix="Use AdamW.",
        source="Loshchilov, Hutter 2019, https://arxiv.org/abs/1711.05101",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.found: dict[int, tuple[str, float, Site]] = {}

    def on_step_end(self, event: ev.StepEnd) -> None:
        optimizer = event.optimizer
        if optimizer.kind not in ADAPTIVE or optimizer.key in self.found:
            return
        for group in optimizer.groups():
            decay = group.get("weight_decay", 0)
            if decay and not group.get("decoupled_weight_decay") and len(self.found) < 100:
                self.found[optimizer.key] = optimizer.kind, float(decay), optimizer.site

    def findings(self) -> Iterable[Finding]:
        for kind, decay, site in self.found.values():
            yield self.report(
                f"{kind} with weight_decay={decay:g} is L2 regularisation, not weight decay.",
                site,
                evidence={"weight_decay": decay},
            )
