"""SF509: a fresh output layer is frozen while the rest trains."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.rules.base import Findings, Rule, Site

LEAST = 3
MOST_MODELS = 1_000
MOST_VALUES = 1 << 22
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


class ParamFrozenByMistake(Rule, page=__file__):
    """The last Linear has init-like weights and requires_grad False while others train."""

    def setup(self) -> None:
        self.loaded: set[int] = set()
        self.looked: dict[int, tuple[int, int]] = {}
        """By model: how many updates and optimizers there were when it was looked at."""
        self.layers: dict[int, set[int]] = {}
        """By model: keys of the layers that it had at first."""
        self.found: dict[int, tuple[str, str, Site]] = {}

    def on_state_restored(self, event: ev.StateRestored) -> None:
        if event.kind == "module":
            self.loaded |= {self.trace.module_key(m) for m in event.owner.modules()}

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if not event.grad_enabled or not self.trace.training_began:
            return
        key = self.trace.module_key(event.module)
        now = self.trace.updates, len(self.trace.optimizers)
        before = self.looked.get(key, (0, 0))
        # A new optimizer begins a new phase, and a layer may have been replaced for it.
        if before[0] and now[0] < 2 * before[0] and now[1] == before[1]:
            return
        if len(self.looked) < MOST_MODELS or key in self.looked:
            self.looked[key] = now
            self._look(event, key)

    def _look(self, event: ev.ForwardEnd, key: int) -> None:
        layers = {n: m for n, m in event.module.named_modules() if isinstance(m, LAYERS)}
        keys = {self.trace.module_key(layer) for layer in layers.values()}
        known = self.layers.setdefault(key, keys)
        if not layers or not self.trace.is_trained(event.module):
            return
        for name in _outputs(layers, event.output):
            layer = layers[name]
            own = self.trace.module_key(layer)
            if layer.weight.requires_grad or own in self.loaded:
                continue
            state = self.trace.parameters.find(layer.weight)
            if state is not None and state.backwards:
                continue
            others = [p for p in parameters_of(event.module) if p.requires_grad and p.dim() > 1]
            if others and (own not in known or _looks_fresh(layer)):
                self.found[key] = name, type(event.module).__name__, event.site

    def findings(self) -> Findings:
        for name, root, site in self.found.values():
            if self.trace.updates < LEAST:
                continue
            message = (
                f"{name or 'The output layer'} of {root} has the weights of a fresh"
                " initialisation and asks for no gradient, while layers before it are trained."
            )
            yield self.report(message, site, layer=name, root=root)


def _outputs(layers: dict[str, Layer], output: object) -> Iterator[str]:
    """Names of the layers that may have made the output: the last one, and those of its width."""
    shape = next((t.shape for t in graph.tensors_in(output) if t.dim() > 1), ())
    widths = {shape[1], shape[-1]} if shape else set()
    last = next(reversed(layers))
    yield last
    yield from (n for n, layer in layers.items() if layer.weight.shape[0] in widths and n != last)


def _looks_fresh(layer: Layer) -> bool:
    weight = layer.weight.detach()
    if weight.device.type != "cpu" or not 16 <= weight.numel() <= MOST_VALUES:
        return False
    # Biases that were trained are not all zero; some ways to initialise set them so.
    if layer.bias is not None and not bool(layer.bias.any()):
        return True
    bound = (weight.numel() // weight.shape[0]) ** -0.5
    highest = float(weight.abs().max())
    spread = float(weight.float().std()) * 3**0.5
    return (
        bool(torch.isfinite(weight).all())
        and 0.9 * bound <= highest <= bound * 1.0001
        and (0.85 * bound <= spread <= 1.15 * bound)
    )
