"""SF404: dropout stays active after eval()."""

from __future__ import annotations

from collections import Counter

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, Site


class DropoutInEval(Rule, page=__file__):
    """A mask is drawn while the root is in eval, by what `eval()` cannot reach."""

    def setup(self) -> None:
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

    def findings(self) -> Findings:
        for (site, how, root), count in self.drawn.items():
            yield self.report(
                f"{count} masks were drawn here by {how} while {root} was in eval mode.",
                site,
                masks=count,
                root=root,
            )
