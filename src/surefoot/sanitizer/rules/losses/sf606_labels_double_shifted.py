"""SF606: targets are shifted twice."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Finding, Site
from surefoot.sanitizer.rules.losses.loss_rule import TokenLossRule


class LabelsDoubleShifted(TokenLossRule, page=__file__):
    """Targets equal the embedded ids two places on, for nearly all positions."""

    def setup(self) -> None:
        super().setup()
        self.one_ahead: set[bool] = set()
        """Whether training calls (True), or calls without gradients, have targets one ahead."""
        self.trains: dict[Site, bool] = {}

    def is_wrong(self, event: ev.LossCalled) -> bool | None:
        if not self.recent.ids:
            return None
        found = self.recent.offsets(event)
        if 1 in found:
            self.one_ahead.add(event.grad_enabled)
        self.trains[event.site] = event.grad_enabled
        return 2 in found and 1 not in found

    def describe(self, site: Site, count: int) -> Finding | None:
        if self.trains[site] in self.one_ahead:
            return None
        message = (
            f"In all {count} calls looked at, the targets equal the input ids two places on: they"
            " were shifted twice."
        )
        return self.report(message, site, calls_looked_at=count, offset=2)
