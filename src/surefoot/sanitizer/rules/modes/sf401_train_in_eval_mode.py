"""SF401: training goes on in eval mode."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.matchers.mode_words import ModeWords
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.rules.base import NOWHERE, Certainty, Findings, Rule, Site, share

LEAST = 3


@dataclass
class _EvalTraining:
    """A module that was trained in eval mode."""

    name: str
    trained_before: bool
    """Whether it had trained in train mode before."""
    asked: bool
    """Whether a line of the user's own put it there, which switches off dropout or BatchNorm."""
    frozen: bool
    """Whether it is part of a larger module that trains."""
    count: int = 0
    site: Site = NOWHERE
    flip: Site = NOWHERE
    """The latest `eval()` of it."""


@dataclass(frozen=True)
class _Used:
    """A forward in eval mode whose output was backpropagated since the latest update."""

    module: weakref.ref[nn.Module]
    site: Site
    drops: bool


class TrainInEvalMode(Rule, page=__file__):
    """A forward in eval mode is backpropagated and stepped, after training in train mode."""

    def setup(self) -> None:
        self.modes = self.use(ModeWords)
        self.trained_in_train: set[int] = set()
        self.flips: dict[int, Site] = {}
        self.flip = NOWHERE
        self.pending: dict[int, _Used] = {}
        self.seen: dict[int, _EvalTraining] = {}

    def on_mode_changed(self, event: ev.ModeChanged) -> None:
        if not event.training:
            self.flip = self.flips[self.trace.module_key(event.module)] = event.site

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        is_active = event.active_dropout or event.active_batch_norm
        if not event.grad_enabled:
            return
        key = self.trace.module_key(event.module)
        if event.training and is_active:
            self.trained_in_train.add(key)
        if event.training or is_active or not event.idle_sensitive:
            return
        node = graph.first_node(event.output)
        used = _Used(weakref.ref(event.module), event.site, event.idle_dropout > 0)

        def backpropagated(grads: object) -> None:
            if "backward" in self.trace.causes:
                self.pending[key] = used

        if node is not None:
            node.register_prehook(backpropagated)

    def on_zero_grad(self, event: ev.ZeroGrad) -> None:
        # An attack, or a measurement, whose gradients no update uses.
        if self.pending and not event.inside_step:
            zeroed = {state.key for state in event.parameters}
            self.pending = {
                key: used
                for key, used in self.pending.items()
                if not self._keys_of(used.module()) & zeroed
            }

    def _keys_of(self, module: nn.Module | None) -> set[int]:
        """Keys of the parameters of a module that optimizers hold."""
        tensors = () if module is None else parameters_of(module)
        states = (self.trace.parameters.find(tensor) for tensor in tensors)
        return {state.key for state in states if state is not None}

    def on_step_end(self, event: ev.StepEnd) -> None:
        for key, used in self.pending.items() if event.update.backwards else ():
            module = used.module()
            if module is None:
                continue
            mine = self._keys_of(module)
            if not any(state.key in mine for state in event.optimizer.parameters):
                continue
            seen = self.seen.get(key)
            if seen is None:
                seen = self.seen[key] = self._begin(key, module, used.drops)
            seen.count += not seen.frozen
            seen.site, seen.flip = used.site, self.flips.get(key, self.flip)
        self.pending = {}

    def _begin(self, key: int, module: nn.Module, drops: bool) -> _EvalTraining:
        word = self.modes.word_on(module)
        return _EvalTraining(
            type(module).__name__,
            trained_before=key in self.trained_in_train,
            asked=word is not None and not word[0] and (drops or _is_fresh(module)),
            frozen=self.modes.is_part_of_training(module),
        )

    def findings(self) -> Findings:
        updates = self.trace.updates
        for seen in self.seen.values():
            if seen.count < LEAST:
                continue
            line = seen.flip.line
            flipped = f"eval() at line {line} was the last word" if line else "eval mode"
            was = "after it had trained in train mode" if seen.trained_before else "from the start"
            is_clear = seen.trained_before or seen.asked
            message = (
                f"{share(seen.count, updates)} updates were computed by {seen.name} in eval mode,"
                f" {was} ({flipped})."
            )
            yield self.report(
                message,
                seen.site,
                certainty=Certainty.STRONG if is_clear else Certainty.HEURISTIC,
                updates=updates,
                in_eval_mode=seen.count,
                eval_line=line,
            )


def _is_fresh(module: nn.Module) -> bool:
    """Whether it has trained BatchNorm layers, none of which has statistics of any data."""
    fresh = []
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.weight is not None and part.weight.requires_grad:
            batches = part.num_batches_tracked
            on_host = batches is not None and batches.device.type == "cpu"
            fresh.append(on_host and batches is not None and not int(batches))
    return bool(fresh) and all(fresh)
