"""SF603: logits go into a loss that expects log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.losscalls import Verdicts, look_now
from surefoot.sanitizer.trace import Trace

TOLERANCE = 0.05
LOGITS = ("Addmm", "Mm", "Bmm", "Convolution", "Linear")


class NllOnLogits(Rule):
    """The input of nll_loss is not normalised."""

    info = RuleInfo(
        code="SF603",
        slug="nll-on-logits",
        certainty=Certainty.PROOF,
        title="nll_loss gets values that are not log-probabilities.",
        observes="The exponentials of the input do not sum to 1 over the classes (on a device:"
        " the input comes straight from a linear layer or a convolution), in every call that is"
        " looked at.",
        why="The loss is just minus the score of the right class: it has no lower bound, and the"
        " scores grow without end.",
        example="F.nll_loss(model(x), labels)  # no log_softmax in the model",
        fix="Use F.cross_entropy on the logits, or log_softmax before nll_loss.",
        source="torch.nn.NLLLoss: the input is expected to contain log-probabilities",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.verdicts = Verdicts()
        self.worst = 0.0
        self.lowest = 0.0

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name != "nll_loss" or not event.grad_enabled or not look_now(event.call):
            return
        values = event.input
        if values.device.type != "cpu":
            node = graph.through_views(values.grad_fn)
            self.verdicts.add(event.site, node is not None and graph.kind(node) in LOGITS)
            return
        if values.numel() == 0 or values.numel() > 1 << 22:
            return
        total = torch.logsumexp(values.detach().float(), dim=1 if values.dim() > 1 else 0)
        off = float(total.abs().max())
        # Probabilities, the other common mistake, sum to more than 1 too.
        self.verdicts.add(event.site, off > TOLERANCE)
        self.worst = max(self.worst, off)
        self.lowest = min(self.lowest, graph.number(event.output) or 0.0)

    def findings(self) -> Iterable[Finding]:
        for site, count in self.verdicts.always():
            below = f"; the loss fell to {self.lowest:.3g}" if self.lowest < 0 else ""
            yield self.report(
                f"The input of nll_loss is not log-probabilities: logsumexp over the classes is up"
                f" to {self.worst:.3g} away from 0 in all {count} calls looked at{below}.",
                site,
                evidence={"calls_looked_at": count, "logsumexp": self.worst, "loss": self.lowest},
            )
