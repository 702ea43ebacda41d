"""SF407: the statistics of a frozen BatchNorm drift."""

from __future__ import annotations

from collections import defaultdict

from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site

LEAST = 3


class FrozenBnDrift(Rule):
    """BatchNorm with all affine parameters frozen updates its statistics while the root trains."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.counts: dict[int, int] = defaultdict(int)
        self.sites: dict[int, tuple[Site, str, str]] = {}
        self.updates: dict[int, set[int]] = defaultdict(set)
        self.versions: dict[int, int] = {}
        self.moving: set[int] = set()

    def on_batch_norm_called(self, event: ev.BatchNormCalled) -> None:
        layer = event.module
        assert isinstance(layer, _BatchNorm)
        if not event.grad_enabled or not layer.affine or not layer.track_running_stats:
            return
        if layer.weight.requires_grad or layer.bias.requires_grad or not event.root.training:
            return
        key = self.trace.module_key(layer)
        self.counts[key] += 1
        version = sum(p._version for p in layer.parameters())
        if self.versions.setdefault(key, version) != version:
            # An averaged copy: its weights are not frozen, and its statistics follow them.
            self.moving.add(key)
        if len(self.updates[key]) < LEAST:
            self.updates[key].add(self.trace.updates)
        if key not in self.sites:
            name = next((n for n, m in event.root.named_modules() if m is layer), "")
            self.sites[key] = event.site, name, type(event.root).__name__

    def findings(self) -> Findings:
        drifting = [
            key for key in self.counts if len(self.updates[key]) >= LEAST and key not in self.moving
        ]
        if not drifting:
            return
        names = [self.sites[key][1] or "a BatchNorm layer" for key in drifting]
        site, _, root = self.sites[drifting[0]]
        yield self.report(
            f"{len(drifting)} BatchNorm layers of {root} with frozen weights updated their running"
            f" statistics in training, {self.counts[drifting[0]]} times: {', '.join(names[:5])}.",
            site,
            layers=names[:20],
            forwards=self.counts[drifting[0]],
        )
