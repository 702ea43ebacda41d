"""SF606: targets are shifted twice."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.losscalls import Verdicts
from surefoot.sanitizer.rules.sequences import LOOKS, RecentIds, offsets
from surefoot.sanitizer.trace import Trace


class LabelsDoubleShifted(Rule):
    """CE targets equal inputs shifted by 2 for nearly all positions."""

    info = RuleInfo(
        code="SF606",
        slug="labels-double-shifted",
        certainty=Certainty.STRONG,
        title="The targets are two tokens ahead of the inputs.",
        observes="The targets of cross_entropy equal the embedded ids two places on, and not one"
        " place on. Quiet where the same forward has a loss at offset 1 too (several-token heads)"
        " and for periodic data.",
        why="The collate function and the loss both shift: the model learns to skip a token, and"
        " generates nonsense.",
        example="labels = ids[:, 1:]  # in collate\nloss(logits[:, :-1], labels[:, 1:])",
        fix="Shift in one place only.",
        source="Follows from the definition of a causal language model.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.recent = RecentIds()
        self.verdicts = Verdicts()
        self.one_ahead: set[bool] = set()
        """Whether training calls (True), or calls without gradients, have targets one ahead."""
        self.trains: dict[Site, bool] = {}

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        self.recent.begin()

    def on_embedding_called(self, event: ev.EmbeddingCalled) -> None:
        self.recent.add(event)

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name not in ("cross_entropy", "nll_loss") or event.call > LOOKS:
            return
        if not self.recent.ids:
            return
        found = offsets(event, self.recent)
        if 1 in found:
            self.one_ahead.add(event.grad_enabled)
        self.trains[event.site] = event.grad_enabled
        self.verdicts.add(event.site, 2 in found and 1 not in found)

    def findings(self) -> Iterable[Finding]:
        for site, count in self.verdicts.always():
            if self.trains[site] not in self.one_ahead:
                yield self.report(
                    f"In all {count} calls looked at, the targets equal the input ids two places"
                    " on: they were shifted twice.",
                    site,
                    evidence={"calls_looked_at": count, "offset": 2},
                )
