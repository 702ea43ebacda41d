"""SF405: a fixed second model gives targets in train mode."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site

LEAST = 3


class _Seen:
    def __init__(self, version: int, site: Site, name: str, updates: int) -> None:
        self.version = version
        self.site = site
        self.name = name
        self.moves = False
        self.first = updates
        self.dropout = self.batch_norm = self.calls = 0
        self.intervals: set[int] = set()


class TeacherInTrainMode(Rule):
    """A model without optimizer runs beside training, with active dropout or BatchNorm."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.seen: dict[int, _Seen] = {}

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        active = event.active_dropout or event.active_batch_norm
        if not event.training or not active or not self.trace.training_began:
            return
        parameters = list(event.module.parameters())
        if event.grad_enabled and any(p.requires_grad for p in parameters):
            return
        version = sum(p._version for p in parameters)
        key = self.trace.module_key(event.module)
        seen = self.seen.get(key)
        if seen is None:
            seen = _Seen(version, event.site, type(event.module).__name__, self.trace.updates)
            self.seen[key] = seen
        seen.moves = seen.moves or version != seen.version
        seen.version = version
        seen.calls += 1
        seen.dropout += event.active_dropout > 0
        seen.batch_norm += event.active_batch_norm > 0
        if len(seen.intervals) < 10_000:
            seen.intervals.add(self.trace.updates)

    def findings(self) -> Findings:
        for seen in self.seen.values():
            since = self.trace.updates - seen.first
            if seen.moves or len(seen.intervals) < max(LEAST, 0.3 * since):
                continue
            yield self.report(
                f"{seen.name}, which is not trained here, ran {seen.calls} times beside training"
                f" in train mode ({seen.dropout} with active dropout, {seen.batch_norm} with"
                " BatchNorm that updated its statistics).",
                seen.site,
                forwards=seen.calls,
                with_active_dropout=seen.dropout,
                with_updating_batch_norm=seen.batch_norm,
            )
