"""SF605: a language model is trained to repeat its input."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Finding, Site
from surefoot.sanitizer.rules.losses.attention import looks_ahead
from surefoot.sanitizer.rules.losses.loss_rule import TokenLossRule, directions


class LabelsNotShifted(TokenLossRule, page=__file__):
    """Targets equal the embedded ids place by place, and the model is causal."""

    def setup(self) -> None:
        super().setup()
        self.recurrent: dict[int, bool] = {}
        self.is_recurrent = False

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        key = self.trace.module_key(event.module)
        if key not in self.recurrent:
            self.recurrent[key] = directions(event.module) == {False}
        self.is_recurrent = self.recurrent[key]

    def is_wrong(self, event: ev.LossCalled) -> bool | None:
        ids = self.recent.ids
        if not ids:
            return None
        if self.recent.offsets(event) != [0] * len(ids):
            return False
        if self.is_recurrent:
            return True
        if event.output.grad_fn is None:
            # Without a graph, in an evaluation, nobody can tell what the model sees.
            return None
        causal, ahead = looks_ahead(event.output.grad_fn, ids[-1].shape[1])
        return causal > 0 and ahead == 0

    def describe(self, site: Site, count: int) -> Finding:
        message = (
            f"In all {count} calls looked at, the targets equal the input ids place by place, and"
            " the model is causal: it predicts the token that it is given."
        )
        return self.report(message, site, calls_looked_at=count, offset=0)
