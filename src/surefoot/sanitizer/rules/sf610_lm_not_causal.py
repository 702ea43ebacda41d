"""SF610: a next-token model can see the next token."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.attention import looks_ahead
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.losscalls import Verdicts
from surefoot.sanitizer.rules.sequences import LOOKS, RecentIds, offsets
from surefoot.sanitizer.trace import Trace


class LmNotCausal(Rule):
    """Targets are shifted by one, and attention (or a recurrent layer) looks ahead."""

    info = RuleInfo(
        code="SF610",
        slug="lm-not-causal",
        certainty=Certainty.STRONG,
        title="A next-token model attends to the token that it is to predict.",
        observes="Targets that are the embedded ids one place on, in a model whose self-attention"
        " over that length has no causal mask, whose convolutions over it are padded on both sides,"
        " or that has a bidirectional recurrent layer; read"
        " from what the graph saved. Quiet for encoder-decoders and masked language models.",
        why="The answer is in the input: the loss falls to zero in training, and generation fails.",
        example="nn.TransformerEncoder(layer, 2)(x)  # no mask, targets ids[:, 1:]",
        fix="Pass a causal mask (is_causal=True) to every self-attention.",
        source="Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.2.3",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.recent = RecentIds()
        self.verdicts = Verdicts()
        self.bidirectional: dict[int, bool] = {}
        self.now_bidirectional = False
        self.layers = 0

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        self.recent.begin()
        key = self.trace.module_key(event.module)
        if key not in self.bidirectional:
            layers = (m for m in event.module.modules() if isinstance(m, nn.RNNBase))
            self.bidirectional[key] = any(layer.bidirectional for layer in layers)
        self.now_bidirectional = self.bidirectional[key]

    def on_embedding_called(self, event: ev.EmbeddingCalled) -> None:
        self.recent.add(event)

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name not in ("cross_entropy", "nll_loss") or event.call > LOOKS:
            return
        # Several sequences: an encoder may look at all of its own.
        if not event.grad_enabled or len(self.recent.ids) != 1:
            return
        if offsets(event, self.recent) != [1]:
            return
        _, ahead = looks_ahead(event.output.grad_fn, self.recent.ids[0].shape[1])
        self.layers = max(self.layers, ahead)
        self.verdicts.add(event.site, ahead > 0 or self.now_bidirectional)

    def findings(self) -> Iterable[Finding]:
        for site, count in self.verdicts.always():
            how = (
                f"{self.layers} self-attentions or convolutions reach beyond their own place"
                if self.layers
                else "a recurrent layer is bidirectional"
            )
            yield self.report(
                f"The targets are the inputs one place on, but {how}: the model sees the token"
                f" that it is to predict (in all {count} calls looked at).",
                site,
                evidence={"calls_looked_at": count, "layers_that_look_ahead": self.layers},
            )
