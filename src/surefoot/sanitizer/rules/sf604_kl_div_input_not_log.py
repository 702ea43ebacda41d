"""SF604: probabilities go into a divergence that expects log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.losscalls import Verdicts, look_now
from surefoot.sanitizer.trace import Trace

TOLERANCE = 0.01


class KlDivInputNotLog(Rule):
    """kl_div input has positive values, or its exp sums to more than 1."""

    info = RuleInfo(
        code="SF604",
        slug="kl-div-input-not-log",
        certainty=Certainty.PROOF,
        title="kl_div gets an input that is not log-probabilities.",
        observes="The first argument of kl_div has positive values, or its exponentials sum to"
        " more than 1 along every axis, in every call that is looked at. The target is not"
        " looked at: it may be either.",
        why="What is minimised is not a divergence: it can fall below zero and pulls to a wrong"
        " distribution.",
        example="F.kl_div(torch.softmax(student, -1), torch.softmax(teacher, -1))",
        fix="Pass log_softmax(student) as the input.",
        source="torch.nn.KLDivLoss: the argument input is expected in the log-space",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.verdicts = Verdicts()
        self.highest = 0.0

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name != "kl_div" or not event.grad_enabled or not look_now(event.call):
            return
        values = event.input
        if values.device.type != "cpu":
            node = graph.through_views(values.grad_fn)
            self.verdicts.add(
                event.site, node is not None and graph.kind(node) in ("Softmax", "SafeSoftmax")
            )
            return
        if values.numel() == 0 or values.dim() == 0:
            return
        plain = values.detach().float()
        highest = float(plain.max())
        self.highest = max(self.highest, highest)
        self.verdicts.add(event.site, highest > TOLERANCE or self._sums_over_one(plain))

    @staticmethod
    def _sums_over_one(values: torch.Tensor) -> bool:
        sums = [float(values.exp().sum(axis).max()) for axis in range(values.dim())]
        return min(sums) > 1 + TOLERANCE

    def findings(self) -> Iterable[Finding]:
        for site, count in self.verdicts.always():
            yield self.report(
                f"The input of kl_div is not log-probabilities in all {count} calls looked at"
                f" (highest value {self.highest:.3g}; logarithms of probabilities are at most 0).",
                site,
                evidence={"calls_looked_at": count, "highest": self.highest},
            )
