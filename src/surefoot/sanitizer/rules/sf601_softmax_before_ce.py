"""SF601: probabilities go into a cross entropy that expects logits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.losscalls import Verdicts, look_now
from surefoot.sanitizer.trace import Trace


class SoftmaxBeforeCe(Rule):
    """The input of cross_entropy is the output of a softmax."""

    info = RuleInfo(
        code="SF601",
        slug="softmax-before-ce",
        certainty=Certainty.PROOF,
        title="cross_entropy gets probabilities where it expects logits.",
        observes="The input of cross_entropy with class targets comes from softmax, or is"
        " non-negative with sums of 1, in every call that is looked at. Quiet for log_softmax"
        " (which is harmless) and for soft targets.",
        why="cross_entropy applies softmax itself. The second softmax bounds the loss away from"
        " zero and makes gradients vanish.",
        example="F.cross_entropy(torch.softmax(logits, -1), labels)",
        fix="Pass the logits; apply softmax only where probabilities are read.",
        source="torch.nn.CrossEntropyLoss: input is expected to contain unnormalised logits",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.verdicts = Verdicts()

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name != "cross_entropy" or not event.grad_enabled or not look_now(event.call):
            return
        if event.target.is_floating_point() or event.input.dim() < 1:
            return
        self.verdicts.add(event.site, is_probabilities(event.input))

    def findings(self) -> Iterable[Finding]:
        for site, count in self.verdicts.always():
            yield self.report(
                f"The input of this cross_entropy is a softmax: non-negative and summing to 1 over"
                f" the classes, in all {count} calls looked at.",
                site,
                evidence={"calls_looked_at": count},
            )


def is_probabilities(values: torch.Tensor) -> bool:
    """Whether `values` is a softmax over its classes, by its graph or else by its numbers."""
    node = graph.through_views(values.grad_fn)
    if node is not None and graph.kind(node) in ("Softmax", "SafeSoftmax"):
        return True
    if values.device.type != "cpu" or values.numel() == 0 or values.numel() > 1 << 22:
        return False
    classes = 1 if values.dim() > 1 else 0
    if values.shape[classes] < 2:
        return False
    sample = values.detach()[:64].float() if values.dim() > 1 else values.detach().float()
    sums = sample.sum(classes)
    return bool((sample >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())
