"""SF609: padding counts in the loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.rules.losscalls import Verdicts
from surefoot.sanitizer.rules.sequences import LOOKS, RecentIds, rows_of
from surefoot.sanitizer.trace import Trace

LEAST_SHARE = 0.05
LEAST_RUN = 2


class LossIncludesPadding(Rule):
    """One target value fills the tail of rows, is the padding value, and is not ignored."""

    info = RuleInfo(
        code="SF609",
        slug="loss-includes-padding",
        certainty=Certainty.HEURISTIC,
        title="Padding counts as a target.",
        observes="Targets whose rows end in runs of different length of one value, which is the"
        " embedding's padding_idx, or is 0 and occurs nowhere else, and is not ignore_index.",
        why="The model is paid for predicting padding; the loss looks better than it is, and long"
        " rows count for less.",
        example="F.cross_entropy(logits, pad_sequence(rows, padding_value=0))",
        fix="Pass ignore_index, or set padded targets to -100.",
        source="torch.nn.CrossEntropyLoss: ignore_index",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.recent = RecentIds()
        self.verdicts = Verdicts()
        self.share = 0.0
        self.value = 0

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        self.recent.begin()

    def on_embedding_called(self, event: ev.EmbeddingCalled) -> None:
        self.recent.add(event)

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if event.name not in ("cross_entropy", "nll_loss") or event.call > LOOKS:
            return
        if event.target.is_floating_point():
            return
        target, padding = event.target, None
        for ids, index in zip(self.recent.ids, self.recent.padding, strict=True):
            rows = rows_of(event.target, ids)
            if rows is not None:
                target, padding = rows, index
        if target.dim() != 2 or target.device.type != "cpu" or target.shape[1] < 4:
            return
        self.verdicts.add(event.site, self._padded(target, padding, event))

    def _padded(self, rows: torch.Tensor, padding: int | None, event: ev.LossCalled) -> bool:
        value = 0 if padding is None else padding
        if event.options.get("ignore_index", -100) == value or rows.shape[0] < 2:
            return False
        is_value = rows == value
        runs = is_value.flip(1).long().cumprod(1).sum(1)
        inside = int(is_value.sum()) - int(runs.sum())
        if padding is None and inside:
            return False
        share = int(runs.sum()) / rows.numel()
        if share < LEAST_SHARE or int(runs.max()) < LEAST_RUN or len(set(runs.tolist())) < 2:
            return False
        self.share, self.value = share, value
        return True

    def findings(self) -> Iterable[Finding]:
        for site, count in self.verdicts.always():
            yield self.report(
                f"In all {count} calls looked at, rows of targets end in runs of {self.value},"
                f" which counts in the loss: {self.share:.0%} of all targets.",
                site,
                evidence={"calls_looked_at": count, "share": self.share, "value": self.value},
            )
