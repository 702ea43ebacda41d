"""SF401: training goes on in eval mode."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers.mode_words import ModeWords
from surefoot.sanitizer.rules.base import NOWHERE, Certainty, Findings, Rule, RuleInfo, Site, share

LEAST = 3


class TrainInEvalMode(Rule):
    """A forward in eval mode is backpropagated and stepped, after training in train mode."""

    info = RuleInfo.beside(__file__)

    def setup(self) -> None:
        self.modes = self.use(ModeWords)
        self.trained_in_train: set[int] = set()
        self.flips: dict[int, Site] = {}
        self.flip = NOWHERE
        self.pending: dict[int, tuple[weakref.ref[nn.Module], Site, bool]] = {}
        self.holders: dict[int, tuple[int, frozenset[int]]] = {}
        self.seen: dict[int, _Seen] = {}

    def on_mode_changed(self, event: ev.ModeChanged) -> None:
        if not event.training:
            self.flip = event.site
            self.flips[self.trace.module_key(event.module)] = event.site

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        if not event.grad_enabled:
            return
        if event.training:
            if event.active_dropout or event.active_batch_norm:
                self.trained_in_train.add(self.trace.module_key(event.module))
            return
        if not event.idle_sensitive or event.active_dropout or event.active_batch_norm:
            return
        key = self.trace.module_key(event.module)
        output = next((t for t in graph.tensors_in(event.output) if t.grad_fn is not None), None)
        if output is None or output.grad_fn is None:
            return
        place = weakref.ref(event.module), event.site, event.idle_dropout > 0

        def used(grads: object) -> None:
            if "backward" in self.trace.causes:
                self.pending[key] = place

        output.grad_fn.register_prehook(used)

    def on_zero_grad(self, event: ev.ZeroGrad) -> None:
        # An attack, or a measurement, whose gradients no update uses.
        keys = {state.key for state in event.parameters} if self.pending else set()
        for key, (reference, _, _) in list(self.pending.items()):
            module = reference()
            tensors = () if module is None else module.parameters()
            states = (self.trace.parameters.find(tensor) for tensor in tensors)
            if not event.inside_step and any(s is not None and s.key in keys for s in states):
                del self.pending[key]

    def on_step_end(self, event: ev.StepEnd) -> None:
        for key, (reference, site, drops) in self.pending.items():
            module = reference()
            if module is None or not event.update.backwards:
                continue
            if event.optimizer.key not in self._holders(key, module):
                continue
            seen = self.seen.get(key)
            if seen is None:
                seen = self.seen[key] = _Seen(type(module).__name__, key in self.trained_in_train)
                word = self.modes.word_on(module)
                seen.asked = word is not None and not word[0] and (drops or _is_fresh(module))
                seen.frozen = self.modes.is_part_of_training(module)
            seen.count += not seen.frozen
            seen.site, seen.flip = site, self.flips.get(key, self.flip)
        self.pending = {}

    def _holders(self, key: int, module: nn.Module) -> frozenset[int]:
        """The optimizers that hold parameters of a module."""
        made = len(self.trace.optimizers)
        known = self.holders.get(key)
        if known is None or known[0] != made:
            states = [self.trace.parameters.find(tensor) for tensor in module.parameters()]
            keys = {state.key for state in states if state is not None}
            known = (
                made,
                frozenset(
                    optimizer.key
                    for optimizer in self.trace.optimizers
                    if any(state.key in keys for state in optimizer.parameters)
                ),
            )
            self.holders[key] = known
        return known[1]

    def findings(self) -> Findings:
        for seen in self.seen.values():
            if seen.count < LEAST:
                continue
            flip = seen.flip
            flipped = f"eval() at line {flip.line} was the last word" if flip.line else "eval mode"
            was = "after it had trained in train mode" if seen.before else "from the start"
            is_clear = seen.before or seen.asked
            yield self.report(
                f"{share(seen.count, self.trace.updates)} updates were computed by {seen.name} in"
                f" eval mode, {was} ({flipped}).",
                seen.site,
                certainty=Certainty.STRONG if is_clear else Certainty.HEURISTIC,
                updates=self.trace.updates,
                in_eval_mode=seen.count,
                eval_line=flip.line,
            )


@dataclass
class _Seen:
    """A module that was trained in eval mode."""

    name: str
    before: bool
    """Whether it had trained in train mode before."""
    asked: bool = False
    """Whether a line of the user's own put it there, which switches off dropout or BatchNorm."""
    frozen: bool = False
    """Whether it is part of a larger module that trains."""
    count: int = 0
    site: Site = NOWHERE
    flip: Site = NOWHERE


def _is_fresh(module: nn.Module) -> bool:
    """Whether it has trained BatchNorm layers, none of which has statistics of any data."""
    fresh = []
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.weight is not None and part.weight.requires_grad:
            batches = part.num_batches_tracked
            on_host = batches is not None and batches.device.type == "cpu"
            fresh.append(on_host and batches is not None and not int(batches))
    return bool(fresh) and all(fresh)
