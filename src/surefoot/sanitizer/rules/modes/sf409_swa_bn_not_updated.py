"""SF409: averaged weights are evaluated with old BatchNorm statistics."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Findings, Rule, Tally


class SwaBnNotUpdated(Rule, page=__file__):
    """AveragedModel with BatchNorm evaluated with statistics older than its weights."""

    def setup(self) -> None:
        self.current: dict[int, float | None] = {}
        self.tally = Tally()
        self.averaged = 0.0

    def _fresh(self, module: nn.Module) -> None:
        if isinstance(module, AveragedModel):
            self.current[self.trace.module_key(module)] = graph.number(module.n_averaged)

    def on_statistics_updated(self, event: ev.StatisticsUpdated) -> None:
        self._fresh(event.module)

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        module = event.module
        if not isinstance(module, AveragedModel):
            return
        if event.training and event.active_batch_norm:
            self._fresh(module)
            return
        averaged = graph.number(module.n_averaged)
        if not event.idle_sensitive or module.use_buffers or not averaged:
            return
        if not any(
            isinstance(m, _BatchNorm) and m.running_mean is not None for m in module.modules()
        ):
            return
        if self.current.get(self.trace.module_key(module)) != averaged:
            self.tally.add(event.site)
            self.averaged = averaged

    def findings(self) -> Findings:
        if self.tally.count:
            message = (
                f"{self.tally.count} forwards of an AveragedModel in eval mode used BatchNorm"
                f" statistics older than its weights, which were averaged {self.averaged:g} times."
            )
            yield self.report(
                message, self.tally.site, forwards=self.tally.count, averaged=self.averaged
            )
