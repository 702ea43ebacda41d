"""SF402: evaluation with active dropout or BatchNorm that learns from it."""

from __future__ import annotations

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.copies import WeightCopies, gives_targets
from surefoot.sanitizer.rules.base import Findings, Rule, RuleInfo, Site


class _Seen:
    def __init__(self) -> None:
        self.calls = 0
        self.dropout = 0
        self.batch_norm = 0
        self.outside_training_data = 0
        self.with_loss = 0
        self.intervals: set[int] = set()
        self.name = ""


class EvalInTrainMode(Rule):
    """No-grad forward with active dropout or updating BatchNorm after training began."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.seen: dict[tuple[int, Site], _Seen] = {}
        self.copies = self.use(WeightCopies)
        self.latest: _Seen | None = None
        self.trained_batch = -1
        """Number of the batch that the latest training forward was given."""

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        active = event.active_dropout or event.active_batch_norm
        if event.grad_enabled and event.training:
            self.trained_batch = self.trace.data.batches
        if event.grad_enabled or not event.training or not active:
            return
        if "update_bn" in self.trace.causes:
            return
        if not self.trace.is_trained(event.module) and not self.copies.follows(event.module):
            return
        key = self.trace.module_key(event.module), event.site
        if key not in self.seen and len(self.seen) >= 1000:
            return
        seen = self.seen.setdefault(key, _Seen())
        seen.calls += 1
        seen.dropout += event.active_dropout > 0
        seen.batch_norm += event.active_batch_norm > 0
        loader = self.trace.data.loader
        # Without a batch of its own since training, its data come from elsewhere.
        fetched = self.trace.data.batches != self.trained_batch
        seen.outside_training_data += loader is None or loader.steps == 0 or not fetched
        if len(seen.intervals) < 10_000:
            seen.intervals.add(self.trace.updates)
        seen.name = type(event.module).__name__
        self.latest = seen

    def on_loss_called(self, event: ev.LossCalled) -> None:
        if not event.grad_enabled and self.latest is not None:
            self.latest.with_loss += 1
            self.latest = None

    def findings(self) -> Findings:
        for (_, site), seen in self.seen.items():
            if gives_targets(seen.intervals, self.trace.updates):
                continue
            recalibrates = (
                not seen.dropout and not seen.outside_training_data and not seen.with_loss
            )
            if recalibrates:
                continue
            what = " and ".join(
                text
                for text, there in (
                    ("dropout was active", seen.dropout),
                    ("BatchNorm updated its statistics", seen.batch_norm),
                )
                if there
            )
            yield self.report(
                f"{seen.calls} forwards of {seen.name} without gradients ran in train mode after"
                f" training began: {what}.",
                site,
                forwards=seen.calls,
                with_active_dropout=seen.dropout,
                with_updating_batch_norm=seen.batch_norm,
            )
