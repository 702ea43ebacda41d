"""SF709: training inputs are not finite, or many steps are skipped."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

import torch

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.frames import NOWHERE, Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo, share
from surefoot.sanitizer.trace import Trace

SKIPPED_SHARE = 0.1
LEAST_SKIPPED = 4


class DataNan(Rule):
    """NaN or inf in a training input, or steps skipped more than a small share."""

    info = RuleInfo(
        code="SF709",
        slug="data-nan",
        certainty=Certainty.PROOF,
        title="Training inputs hold NaN or infinity.",
        observes="Inputs of training forwards that are not finite, whose loss is not finite"
        " either (proof); or a gradient scaler that keeps skipping steps after it had found its"
        " scale (strong). Quiet for the scale search at the start and for NaN that the model"
        " masks out.",
        why="One such row makes the gradient of the whole batch NaN: the step is skipped in"
        " silence, or the weights are lost.",
        example="x[sensor_was_off] = float('nan')",
        fix="Remove or fill such rows before they are batched.",
        source="Follows from IEEE 754.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.pending: Site = NOWHERE
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        self.batches = 0
        self.bad = 0
        self.site: Site = NOWHERE
        self.scaler_steps: dict[int, list[bool]] = {}
        self.scaler_site: Site = NOWHERE

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        if event.grad_enabled:
            self.batches += 1
            self.pending = event.site
            inputs = graph.tensors_in([*event.arguments, *event.keywords.values()])
            self.inputs = [weakref.ref(tensor) for tensor in inputs if tensor.is_floating_point()]

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        inputs, self.inputs = self.inputs, []
        if not inputs or not event.roots:
            return
        value = graph.number(event.roots[0])
        # Inputs are read only where the loss is not finite, or tells nothing without a wait.
        if value is not None and math.isfinite(value):
            return
        if any(self._is_bad(tensor) for ref in inputs if (tensor := ref()) is not None):
            self.bad += 1
            self.site = self.pending

    def _is_bad(self, tensor: torch.Tensor) -> bool:
        readable = tensor.device.type == "cpu" or self.trace.deep
        return readable and not bool(torch.isfinite(tensor.detach()).all())

    def on_scaler_stepped(self, event: ev.ScalerStepped) -> None:
        steps = self.scaler_steps.setdefault(event.scaler.key, [])
        if len(steps) < 100_000:
            steps.append(event.stepped)
        self.scaler_site = event.site

    def findings(self) -> Iterable[Finding]:
        if self.bad:
            yield self.report(
                f"{share(self.bad, self.batches)} training forwards had NaN or infinity in their"
                " input, and the loss was not finite.",
                self.site,
                evidence={"forwards": self.batches, "not_finite": self.bad},
            )
            return
        for steps in self.scaler_steps.values():
            after = steps[steps.index(True) :] if True in steps else []
            skipped = after.count(False)
            if skipped >= LEAST_SKIPPED and skipped > SKIPPED_SHARE * len(after):
                yield self.report(
                    f"The gradient scaler skipped {share(skipped, len(after))} steps after it had"
                    " found a scale: gradients are often not finite.",
                    self.scaler_site,
                    certainty=Certainty.STRONG,
                    evidence={"steps": len(after), "skipped": skipped},
                    fix="Look for NaN and infinity in the data and for overflows in the model.",
                )
