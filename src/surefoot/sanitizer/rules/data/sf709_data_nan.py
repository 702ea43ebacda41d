"""SF709: training inputs are not finite, or many steps are skipped."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.rules.base import NOWHERE, Certainty, Findings, Rule, Site, share

SKIPPED_SHARE = 0.1
LEAST_SKIPPED = 4


class DataNan(Rule, page=__file__):
    """NaN or inf in a training input, or steps skipped more than a small share."""

    def setup(self) -> None:
        self.pending: Site = NOWHERE
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        self.batch: list[weakref.ref[torch.Tensor]] = []
        """What the latest batch of a loader had in floating point: targets are in it too."""
        self.batches = 0
        self.bad = 0
        self.judged = True
        """Whether the latest training forward was judged already."""
        self.suspect = False
        """Whether both its input and its output are not finite."""
        self.skips = False
        """Whether there were training forwards that no backward pass followed."""
        self.site: Site = NOWHERE
        self.scaler_steps: dict[int, list[bool]] = {}
        self.scaler_site: Site = NOWHERE

    def on_batch_fetched(self, event: ev.BatchFetched) -> None:
        self.batch = _floating([event.batch])

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        if not event.grad_enabled:
            return
        if not self.judged:
            self.skips = True
            if self.suspect:
                self._count()
        self.batches += 1
        self.pending = event.site
        self.judged = self.suspect = False
        self.inputs = _floating(event.inputs)

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        # Who skips batches leaves no backward pass by which the bad ones could be told.
        if self.skips and event.grad_enabled and not self.judged and self._has_bad(self.inputs):
            self.suspect = any(self._is_bad(t) for t in graph.tensors_in(event.output))

    def on_loss_called(self, event: ev.LossCalled) -> None:
        value = graph.number(event.output)
        if self.judged or not event.grad_enabled or value is None or math.isfinite(value):
            return
        target = _floating([event.target])
        if self._has_bad(self.inputs) or self._has_bad(target):
            self._count()

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if self.judged or not event.roots:
            return
        value = graph.number(event.roots[0])
        # Inputs are read only where the loss is not finite, or tells nothing without a wait.
        is_finite = value is not None and math.isfinite(value)
        if not is_finite and (self._has_bad(self.inputs) or self._has_bad(self.batch)):
            self._count()
        self.judged = True

    def on_run_ended(self, event: ev.RunEnded) -> None:
        if self.suspect and not self.judged:
            self._count()

    def _count(self) -> None:
        self.bad += 1
        self.judged = True
        self.site = self.pending

    def _has_bad(self, tensors: list[weakref.ref[torch.Tensor]]) -> bool:
        return any(self._is_bad(tensor) for ref in tensors if (tensor := ref()) is not None)

    def _is_bad(self, tensor: torch.Tensor) -> bool:
        readable = graph.is_readable(tensor, self.trace.deep)
        return (
            readable
            and tensor.is_floating_point()
            and not bool(torch.isfinite(tensor.detach()).all())
        )

    def on_scaler_stepped(self, event: ev.ScalerStepped) -> None:
        steps = self.scaler_steps.setdefault(event.scaler.key, [])
        if len(steps) < 100_000:
            steps.append(event.stepped)
        self.scaler_site = event.site

    def findings(self) -> Findings:
        if self.bad:
            message = (
                f"{share(self.bad, self.batches)} training forwards had NaN or infinity in their"
                " input or target, and the loss was not finite."
            )
            yield self.report(message, self.site, forwards=self.batches, not_finite=self.bad)
            return
        for steps in self.scaler_steps.values():
            after = steps[steps.index(True) :] if True in steps else []
            skipped = after.count(False)
            if skipped >= LEAST_SKIPPED and skipped > SKIPPED_SHARE * len(after):
                message = (
                    f"The gradient scaler skipped {share(skipped, len(after))} steps after it had"
                    " found a scale: gradients are often not finite."
                )
                yield self.report(
                    message,
                    self.scaler_site,
                    certainty=Certainty.STRONG,
                    steps=len(after),
                    skipped=skipped,
                    fix="Look for NaN and infinity in the data and for overflows in the model.",
                )


def _floating(values: Sequence[Any]) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(t) for t in graph.tensors_in(values) if t.is_floating_point()]
