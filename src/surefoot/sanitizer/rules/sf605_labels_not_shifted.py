"""SF605: a language model is trained to repeat its input."""

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


class LabelsNotShifted(Rule):
    """CE targets equal the embedded ids position by position, and the model is causal."""

    info = RuleInfo(
        code="SF605",
        slug="labels-not-shifted",
        certainty=Certainty.STRONG,
        title="The targets of a causal language model are its own inputs.",
        observes="The targets of cross_entropy equal the embedded token ids place by place, in a"
        " model whose attention is causal or that is recurrent. Quiet for masked language models,"
        " autoencoders without a causal mask, encoder-decoders and periodic data. The comparison is"
        " made at the loss, so models that shift inside are not taken for one.",
        why="The model can see what it is to predict: the loss falls to zero and nothing is"
        " learned.",
        example="F.cross_entropy(logits.flatten(0, 1), ids.flatten())",
        fix="Compare logits[:, :-1] with ids[:, 1:].",
        source="Follows from the definition of a causal language model.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.recent = RecentIds()
        self.verdicts = Verdicts()
        self.recurrent: dict[int, bool] = {}
        self.is_recurrent = False

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        self.recent.begin()
        key = self.trace.module_key(event.module)
        if key not in self.recurrent:
            layers = [m for m in event.module.modules() if isinstance(m, nn.RNNBase)]
            self.recurrent[key] = bool(layers) and not any(m.bidirectional for m in layers)
        self.is_recurrent = self.recurrent[key]

    def on_embedding_called(self, event: ev.EmbeddingCalled) -> None:
        self.recent.add(event)

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name not in ("cross_entropy", "nll_loss") or event.call > LOOKS:
            return
        if not self.recent.ids:
            return
        found = offsets(event, self.recent)
        copies = (
            bool(found)
            and all(offset == 0 for offset in found)
            and len(found) == len(self.recent.ids)
        )
        if copies and not self.is_recurrent:
            causal, ahead = looks_ahead(event.output.grad_fn, self.recent.ids[-1].shape[1])
            copies = causal > 0 and ahead == 0
        self.verdicts.add(event.site, copies)

    def findings(self) -> Iterable[Finding]:
        for site, count in self.verdicts.always():
            yield self.report(
                f"In all {count} calls looked at, the targets equal the input ids place by place,"
                " and the model is causal: it predicts the token that it is given.",
                site,
                evidence={"calls_looked_at": count, "offset": 0},
            )
