"""SF609: padding counts in the loss."""

from __future__ import annotations

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.sequences import rows_of
from surefoot.sanitizer.rules.base import Finding, Site
from surefoot.sanitizer.rules.losses.loss_rule import TokenLossRule

LEAST_SHARE = 0.05
LEAST_RUN = 2


class LossIncludesPadding(TokenLossRule, page=__file__):
    """One target value fills the tail of rows, is the padding value, and is not ignored."""

    def setup(self) -> None:
        super().setup()
        self.share = 0.0
        self.value = 0

    def is_wrong(self, event: ev.LossCalled) -> bool | None:
        target, padding = event.target, None
        if target.is_floating_point():
            return None
        for ids, index in zip(self.recent.ids, self.recent.padding, strict=True):
            rows = rows_of(event.target, ids)
            if rows is not None:
                target, padding = rows, index
        if target.dim() != 2 or target.device.type != "cpu" or target.shape[1] < 4:
            return None
        return self._is_padded(target, padding, event.options.get("ignore_index", -100))

    def _is_padded(self, rows: torch.Tensor, padding: int | None, ignored: int) -> bool:
        value = 0 if padding is None else padding
        if ignored == value or rows.shape[0] < 2:
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

    def describe(self, site: Site, count: int) -> Finding:
        message = (
            f"In all {count} calls looked at, rows of targets end in runs of {self.value}, which"
            f" counts in the loss: {self.share:.0%} of all targets."
        )
        return self.report(message, site, calls_looked_at=count, share=self.share, value=self.value)
