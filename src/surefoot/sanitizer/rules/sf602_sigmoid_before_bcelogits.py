"""SF602: probabilities go into a binary cross entropy that expects logits."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.losscalls import Verdicts, look_now
from surefoot.sanitizer.trace import Trace

LEAST_BY_VALUE = 8


class SigmoidBeforeBceLogits(Rule):
    """The input of binary_cross_entropy_with_logits is the output of a sigmoid."""

    info = RuleInfo(
        code="SF602",
        slug="sigmoid-before-bcelogits",
        certainty=Certainty.PROOF,
        title="binary_cross_entropy_with_logits gets probabilities where it expects logits.",
        observes="The input comes from a sigmoid (proof), or always lies between 0 and 1"
        " (heuristic).",
        why="The loss applies sigmoid itself. Twice applied, no output can go below 0.5, and"
        " gradients vanish.",
        example="nn.BCEWithLogitsLoss()(torch.sigmoid(logits), labels)",
        fix="Pass the logits; apply sigmoid only where probabilities are read.",
        source="torch.nn.BCEWithLogitsLoss: this loss combines a Sigmoid layer and the BCELoss",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.by_graph = Verdicts()
        self.by_value = Verdicts()

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name != "binary_cross_entropy_with_logits" or not look_now(event.call):
            return
        if not event.grad_enabled or event.input.grad_fn is None:
            return
        inside = True
        if event.input.device.type == "cpu" and event.input.numel():
            values = event.input.detach()
            inside = bool(((values >= 0) & (values <= 1)).all())
            self.by_value.add(event.site, inside)
        self.by_graph.add(event.site, inside and graph.is_sigmoid(event.input.grad_fn))

    def findings(self) -> Iterable[Finding]:
        proven = set()
        for site, count in self.by_graph.always():
            proven.add(site)
            yield self.report(
                f"The input of this loss is the output of a sigmoid, in all {count} calls looked"
                " at: sigmoid is applied twice.",
                site,
                evidence={"calls_looked_at": count},
            )
        for site, count in self.by_value.always(LEAST_BY_VALUE):
            if site not in proven and count >= LEAST_BY_VALUE:
                yield self.report(
                    f"The input of this loss lay between 0 and 1 in all {count} calls looked at:"
                    " probabilities, it seems, where logits are expected.",
                    site,
                    certainty=Certainty.HEURISTIC,
                    evidence={"calls_looked_at": count},
                )
