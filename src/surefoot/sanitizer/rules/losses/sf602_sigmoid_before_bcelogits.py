"""SF602: probabilities go into a binary cross entropy that expects logits."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Certainty, Finding, Findings, Looks, Site
from surefoot.sanitizer.rules.losses.loss_rule import LossRule

LEAST_BY_VALUE = 8


class SigmoidBeforeBceLogits(LossRule, page=__file__):
    """The input of binary_cross_entropy_with_logits is the output of a sigmoid."""

    losses = ("binary_cross_entropy_with_logits",)

    def setup(self) -> None:
        super().setup()
        self.by_value = Looks[Site]()

    def is_wrong(self, event: ev.LossCalled) -> bool | None:
        if event.input.grad_fn is None:
            return None
        inside = True
        if event.input.device.type == "cpu" and event.input.numel():
            values = event.input.detach()
            inside = bool(((values >= 0) & (values <= 1)).all())
            self.by_value.add(event.site, inside)
        return inside and graph.is_sigmoid(event.input.grad_fn)

    def describe(self, site: Site, count: int) -> Finding:
        message = (
            f"The input of this loss is the output of a sigmoid, in all {count} calls looked at:"
            " sigmoid is applied twice."
        )
        return self.report(message, site, calls_looked_at=count)

    def findings(self) -> Findings:
        proven = list(super().findings())
        yield from proven
        lines = {(finding.file, finding.line) for finding in proven}
        for site, count, _ in self.by_value.often(LEAST_BY_VALUE):
            if (site.file, site.line) not in lines:
                message = (
                    f"The input of this loss lay between 0 and 1 in all {count} calls looked at:"
                    " it seems to be probabilities, where logits are expected."
                )
                yield self.report(
                    message, site, certainty=Certainty.HEURISTIC, calls_looked_at=count
                )
