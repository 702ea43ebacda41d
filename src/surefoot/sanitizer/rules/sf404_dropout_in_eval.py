"""SF404: dropout stays active after eval()."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace


class DropoutInEval(Rule):
    """A mask is drawn while the root is in eval, by what `eval()` cannot reach."""

    info = RuleInfo(
        code="SF404",
        slug="dropout-in-eval",
        certainty=Certainty.PROOF,
        title="Dropout is active although the model is in eval mode.",
        observes="A dropout mask drawn during the forward of a root module in eval mode: by"
        " F.dropout whose module is in eval too, or by a Dropout layer that is not registered in"
        " the root. Quiet for registered layers that were set to train mode (MC dropout).",
        why="eval() cannot reach it: evaluation and inference stay random.",
        example="def forward(self, x):\n    return self.fc(F.dropout(x, 0.5))",
        fix="Register nn.Dropout in __init__, or pass training=self.training.",
        source="https://pytorch.org/docs/stable/generated/torch.nn.functional.dropout.html",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.drawn: Counter[tuple[Site, str, str]] = Counter()

    def on_dropout_called(self, event: ev.DropoutCalled) -> None:
        if event.root is None or event.root_training or event.owner is None:
            return
        if event.owner_is_dropout:
            if event.registered:
                return
            how = "a Dropout layer that is not registered in the model"
        else:
            if event.owner.training and event.registered:
                return
            how = "dropout called with training=True"
        if len(self.drawn) < 1000:
            self.drawn[event.site, how, type(event.root).__name__] += 1

    def findings(self) -> Iterable[Finding]:
        for (site, how, root), count in self.drawn.items():
            yield self.report(
                f"{count} masks were drawn here by {how} while {root} was in eval mode.",
                site,
                evidence={"masks": count, "root": root},
            )
