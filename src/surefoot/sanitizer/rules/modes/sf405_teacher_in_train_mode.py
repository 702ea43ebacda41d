"""SF405: a fixed second model gives targets in train mode."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import weights_mark
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.rules.base import Findings, Rule, Site
from surefoot.sanitizer.rules.modes.active_calls import ActiveCalls, is_active

LEAST = 3
SHARE = 0.3
"""Of the updates since its first call."""


class _Teacher:
    def __init__(self, mark: object, site: Site, updates: int) -> None:
        self.calls = ActiveCalls()
        self.mark = mark
        """Of its weights, at the latest call."""
        self.site = site
        self.first = updates
        self.moves = False


class TeacherInTrainMode(Rule, page=__file__):
    """A model without optimizer runs beside training, with active dropout or BatchNorm."""

    def setup(self) -> None:
        self.seen: dict[int, _Teacher] = {}

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if not is_active(event) or not self.trace.training_began:
            return
        parameters = list(parameters_of(event.module))
        if event.grad_enabled and any(p.requires_grad for p in parameters):
            return
        mark, key = weights_mark(parameters), self.trace.module_key(event.module)
        if key not in self.seen:
            self.seen[key] = _Teacher(mark, event.site, self.trace.updates)
        seen = self.seen[key]
        seen.moves = seen.moves or mark != seen.mark
        seen.mark = mark
        seen.calls.add(event, self.trace.updates)

    def findings(self) -> Findings:
        for seen in self.seen.values():
            calls, since = seen.calls, self.trace.updates - seen.first
            if seen.moves or len(calls.intervals) < max(LEAST, SHARE * since):
                continue
            message = (
                f"{calls.name}, which is not trained here, ran {calls.count} times beside training"
                f" in train mode ({calls.dropout} with active dropout, {calls.batch_norm} with"
                " BatchNorm that updated its statistics)."
            )
            yield self.report(message, seen.site, **calls.evidence)
