"""SF402: evaluation with active dropout or BatchNorm that learns from it."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.copies import WeightCopies, gives_targets
from surefoot.sanitizer.rules.base import Findings, Rule, Site
from surefoot.sanitizer.rules.modes.active_calls import ActiveCalls, is_active

MOST_PLACES = 1000


class _Evaluation:
    """Forwards of one module at one place."""

    def __init__(self) -> None:
        self.calls = ActiveCalls()
        self.outside_training_data = self.with_loss = 0

    @property
    def recalibrates(self) -> bool:
        """Whether it only brings the statistics of BatchNorm up to date with training data."""
        return not (self.calls.dropout or self.outside_training_data or self.with_loss)


class EvalInTrainMode(Rule, page=__file__):
    """A forward without gradients with active dropout or BatchNorm after training began."""

    def setup(self) -> None:
        self.seen: dict[tuple[int, Site], _Evaluation] = {}
        self.copies = self.use(WeightCopies)
        self.latest: _Evaluation | None = None
        self.trained_batch = -1
        """Number of the batch that the latest training forward was given."""

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        data = self.trace.data
        if event.grad_enabled and event.training:
            self.trained_batch = data.batches
        if event.grad_enabled or not is_active(event) or "update_bn" in self.trace.causes:
            return
        if not self.trace.is_trained(event.module) and not self.copies.follows(event.module):
            return
        key = self.trace.module_key(event.module), event.site
        if key not in self.seen and len(self.seen) >= MOST_PLACES:
            return
        seen = self.latest = self.seen.setdefault(key, _Evaluation())
        seen.calls.add(event, self.trace.updates)
        # Without a batch of its own since training, its data come from elsewhere.
        fetched = data.batches != self.trained_batch
        seen.outside_training_data += data.loader is None or not data.loader.steps or not fetched

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if not event.grad_enabled and self.latest is not None:
            self.latest.with_loss += 1
            self.latest = None

    def findings(self) -> Findings:
        for (_, site), seen in self.seen.items():
            calls = seen.calls
            if gives_targets(calls.intervals, self.trace.updates) or seen.recalibrates:
                continue
            what = ["dropout was active"] * bool(calls.dropout)
            what += ["BatchNorm updated its statistics"] * bool(calls.batch_norm)
            message = (
                f"{calls.count} forwards of {calls.name} without gradients ran in train mode after"
                f" training began: {' and '.join(what)}."
            )
            yield self.report(message, site, **calls.evidence)
