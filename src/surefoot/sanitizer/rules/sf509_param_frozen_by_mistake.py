"""SF509: a fresh output layer is frozen while the rest trains."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from surefoot.core.finding import Certainty, Finding
from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.rules.base import Rule, RuleInfo
from surefoot.sanitizer.trace import Trace

LEAST = 3
MOST_VALUES = 1 << 22


class ParamFrozenByMistake(Rule):
    """The last Linear has init-like weights and requires_grad False while others train."""

    info = RuleInfo(
        code="SF509",
        slug="param-frozen-by-mistake",
        certainty=Certainty.HEURISTIC,
        title="The output layer looks freshly initialised and is frozen.",
        observes="The last Linear of a trained model asks for no gradient, its weights fill"
        " exactly the range of the default initialisation, and ordinary layers before it are"
        " trained. Quiet where weights were loaded into the model after it was made.",
        why="The model must learn through a random, fixed output layer.",
        example="model.head = nn.Linear(512, 10)\n"
        "for p in model.parameters(): p.requires_grad = False\n"
        "for p in model.layer4.parameters(): p.requires_grad = True",
        fix="Set requires_grad_(True) on the new layer.",
        source="Follows from requires_grad.",
    )

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.loaded: set[int] = set()
        self.looked: set[int] = set()
        self.found: dict[int, tuple[str, str, Site]] = {}

    def on_state_restored(self, event: ev.StateRestored) -> None:
        if event.kind == "module":
            self.loaded |= {self.trace.module_key(m) for m in event.owner.modules()}

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if not event.grad_enabled or not self.trace.training_began:
            return
        key = self.trace.module_key(event.module)
        if key in self.looked or len(self.looked) > 1000:
            return
        self.looked.add(key)
        layers = [
            (name, module)
            for name, module in event.module.named_modules()
            if isinstance(module, nn.Linear)
        ]
        if len(layers) < 1 or not self.trace.is_trained(event.module):
            return
        name, last = layers[-1]
        if last.weight.requires_grad or self.trace.module_key(last) in self.loaded:
            return
        others = [p for p in event.module.parameters() if p.requires_grad and p.dim() > 1]
        if others and _looks_fresh(last):
            self.found[key] = name, type(event.module).__name__, event.site

    def findings(self) -> Iterable[Finding]:
        for name, root, site in self.found.values():
            if self.trace.updates < LEAST:
                continue
            yield self.report(
                f"{name or 'The output layer'} of {root} has the weights of a fresh"
                " initialisation and asks for no gradient, while layers before it are trained.",
                site,
                evidence={"layer": name, "root": root},
            )


def _looks_fresh(layer: nn.Linear) -> bool:
    weight = layer.weight.detach()
    if weight.device.type != "cpu" or not 16 <= weight.numel() <= MOST_VALUES:
        return False
    bound = layer.in_features**-0.5
    highest = float(weight.abs().max())
    spread = float(weight.float().std()) * 3**0.5
    return (
        bool(torch.isfinite(weight).all())
        and 0.9 * bound <= highest <= bound * 1.0001
        and (0.85 * bound <= spread <= 1.15 * bound)
    )
