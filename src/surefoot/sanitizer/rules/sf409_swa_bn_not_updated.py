"""SF409: averaged weights are evaluated with old BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import Rule, RuleInfo, Tally
from surefoot.sanitizer.trace import Trace


class SwaBnNotUpdated(Rule):
    """AveragedModel with BatchNorm evaluated with statistics older than its weights."""

    info = RuleInfo(
        code="SF409",
        slug="swa-bn-not-updated",
        certainty=Certainty.STRONG,
        title="An averaged model is evaluated with BatchNorm statistics of other weights.",
        observes="A forward in eval mode of an AveragedModel with BatchNorm whose weights were"
        " averaged since its statistics were last computed. Quiet for use_buffers=True.",
        why="The statistics belong to the weights at the time of the copy; the averaged weights"
        " give other activations, and accuracy can fall to chance.",
        example="swa_model.update_parameters(model)\nevaluate(swa_model)",
        fix="Call torch.optim.swa_utils.update_bn(train_loader, swa_model) before evaluating.",
        source="Izmailov et al. 2018, https://arxiv.org/abs/1803.05407; torch.optim.swa_utils",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
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

    def findings(self) -> Iterable[Finding]:
        if self.tally.count:
            yield self.report(
                f"{self.tally.count} forwards of an AveragedModel in eval mode used BatchNorm"
                f" statistics older than its weights, which were averaged {self.averaged:g} times.",
                self.tally.site,
                evidence={"forwards": self.tally.count, "averaged": self.averaged},
            )
