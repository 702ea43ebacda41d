"""Signs that a model which no optimizer holds was meant to be trained all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.listener import Listener
from surefoot.sanitizer.matchers.copies import shapes_of
from surefoot.sanitizer.matchers.mode_words import ModeWords
from surefoot.sanitizer.names import parameters_of

MOST_MODULES = 10_000
ONE_LAYER = 2
"""Tensors of a layer with a bias: another of the same shapes, such as a second projection, is
common and no sign of a copy."""


@dataclass
class _Model:
    """What is known of an outermost module."""

    train_line: int = 0
    """Line that put it into train mode, where that was the last word; 0 for none."""
    trains: bool = True
    """Whether it was in train mode whenever it was looked at."""
    is_copy: bool = False
    """Whether another model has the same shapes, as teachers, targets and averages have."""
    fed_by_trained: bool = False
    """Whether gradients flow on from it to whatever made its input."""


class Intent(Listener):
    """Follows the outermost modules: modes, loading, saving, and what they are fed."""

    def setup(self) -> None:
        self.modes = self.use(ModeWords)
        self.models: dict[int, _Model] = {}
        self.loaded: set[int] = set()
        self.saved: set[int] = set()

    def on_state_restored(self, event: ev.StateRestored) -> None:
        self._note(self.loaded, event.kind, event.owner)

    def on_state_taken(self, event: ev.StateTaken) -> None:
        # What is taken before any training starts another model from the same weights.
        if self.trace.training_began:
            self._note(self.saved, event.kind, event.owner)

    def _note(self, keys: set[int], kind: str, owner: object) -> None:
        if kind == "module" and isinstance(owner, nn.Module) and len(keys) < MOST_MODULES:
            keys.update(self.trace.module_key(module) for module in owner.modules())

    def on_forward_begin(self, event: ev.ForwardBegin) -> None:
        if not event.grad_enabled:
            return
        key = self.trace.module_key(event.module)
        if key not in self.models and len(self.models) < MOST_MODULES:
            self.models[key] = _Model()
        model = self.models.get(key)
        if model is not None and not model.fed_by_trained:
            given = graph.tensors_in(event.inputs, 2)
            model.fed_by_trained = any(tensor.grad_fn is not None for tensor in given)

    def untrained(self) -> Iterator[tuple[int, nn.Module]]:
        """Looks anew at the models that no optimizer trains, and gives them with their keys."""
        roots = list(self.trace.names.models())
        shapes = [shapes_of(module) for module in roots]
        for module, own in zip(roots, shapes, strict=True):
            key = self.trace.module_key(module)
            model = self.models.get(key)
            if model is None or not own or self.trace.is_trained(module):
                continue
            word = self.modes.word_on(module)
            model.train_line = word[1].line if word is not None and word[0] else 0
            model.trains = model.trains and module.training
            model.is_copy = model.is_copy or (len(own) > ONE_LAYER and shapes.count(own) > 1)
            yield key, module

    def reason(self, key: int, clipped: bool) -> str:
        """Why a model seems to be meant to be trained; empty where nothing says so."""
        model = self.models.get(key)
        if model is None or not model.trains:
            return ""
        if clipped:
            return "their gradients are clipped"
        if model.train_line:
            return f"their model was put into train mode at line {model.train_line}"
        if model.is_copy or key in self.loaded:
            return ""
        if model.fed_by_trained:
            return "their model is fed by trained layers and was loaded from nowhere"
        if key in self.saved:
            return "their model was loaded from nowhere, and its weights are saved"
        return ""


def of_module(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of a module that ask for a gradient."""
    return (parameter for parameter in parameters_of(module) if parameter.requires_grad)
