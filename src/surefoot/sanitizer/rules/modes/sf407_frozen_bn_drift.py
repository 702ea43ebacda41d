"""SF407: the statistics of a frozen BatchNorm drift."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import weights_mark
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.rules.base import Findings, Rule, Site

LEAST = 3


@dataclass
class _FrozenLayer:
    name: str
    root: str
    site: Site
    mark: object
    """Of its weights, when it was first called."""
    moves: bool = False
    forwards: int = 0
    updates: set[int] = field(default_factory=set)
    """The first few numbers of updates after which it was called."""


class FrozenBnDrift(Rule, page=__file__):
    """A BatchNorm layer with frozen weights updates its statistics while the model trains."""

    def setup(self) -> None:
        self.layers: dict[int, _FrozenLayer] = {}

    def on_batch_norm_called(self, event: ev.BatchNormCalled) -> None:
        module, root = event.module, event.root
        assert isinstance(module, _BatchNorm)
        if not event.grad_enabled or not module.affine or not module.track_running_stats:
            return
        if module.weight.requires_grad or module.bias.requires_grad or not root.training:
            return
        key, mark = self.trace.module_key(module), weights_mark(parameters_of(module))
        if key not in self.layers:
            name = next((n for n, m in root.named_modules() if m is module), "")
            self.layers[key] = _FrozenLayer(name, type(root).__name__, event.site, mark)
        layer = self.layers[key]
        layer.forwards += 1
        # An averaged copy: its weights are not frozen, and its statistics follow them.
        layer.moves = layer.moves or layer.mark != mark
        if len(layer.updates) < LEAST:
            layer.updates.add(self.trace.updates)

    def findings(self) -> Findings:
        drifting = [
            layer
            for layer in self.layers.values()
            if len(layer.updates) >= LEAST and not layer.moves
        ]
        if drifting:
            first, names = drifting[0], [layer.name or "a BatchNorm layer" for layer in drifting]
            message = (
                f"{len(names)} BatchNorm layers of {first.root} with frozen weights updated their"
                f" running statistics in training, {first.forwards} times: {', '.join(names[:5])}."
            )
            yield self.report(message, first.site, layers=names[:20], forwards=first.forwards)
