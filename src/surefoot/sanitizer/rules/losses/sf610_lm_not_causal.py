"""SF610: a next-token model can see the next token."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Finding, Site
from surefoot.sanitizer.rules.losses.attention import looks_ahead
from surefoot.sanitizer.rules.losses.loss_rule import TokenLossRule, directions


class LmNotCausal(TokenLossRule, page=__file__):
    """Targets are shifted by one, and attention (or a recurrent layer) looks ahead."""

    in_training = True

    def setup(self) -> None:
        super().setup()
        self.bidirectional: dict[int, bool] = {}
        self.now_bidirectional = False
        self.layers = 0

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        key = self.trace.module_key(event.module)
        if key not in self.bidirectional:
            self.bidirectional[key] = True in directions(event.module)
        self.now_bidirectional = self.bidirectional[key]

    def is_wrong(self, event: ev.LossCalled) -> bool | None:
        # Several sequences: an encoder may look at all of its own.
        if len(self.recent.ids) != 1 or self.recent.offsets(event) != [1]:
            return None
        _, ahead = looks_ahead(event.output.grad_fn, self.recent.ids[0].shape[1])
        self.layers = max(self.layers, ahead)
        return ahead > 0 or self.now_bidirectional

    def describe(self, site: Site, count: int) -> Finding:
        how = (
            f"{self.layers} self-attentions or convolutions reach beyond their own place"
            if self.layers
            else "a recurrent layer is bidirectional"
        )
        message = (
            f"The targets are the inputs one place on, but {how}: the model sees the token that it"
            f" is to predict (in all {count} calls looked at)."
        )
        return self.report(message, site, calls_looked_at=count, layers_that_look_ahead=self.layers)
