"""Names of parameters, as the outermost modules that were called have them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from surefoot.sanitizer.state import ParameterState

MODELS_KEPT = 64


def parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module, each once.

    A script may have overridden `parameters` to give a list, groups, or something else.
    """
    seen: set[int] = set()
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


class ModelNames:
    """The outermost modules, and the names that they give to parameters."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._known: set[int] = set()
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str, str]] = {}

    def know(self, module: nn.Module) -> None:
        """Remembers an outermost module, to name parameters by."""
        if id(module) in self._known and any(model() is module for model in self._models):
            return
        self._known.add(id(module))
        if len(self._models) < MODELS_KEPT:
            self._models.append(weakref.ref(module))
            self._learn(module)

    def models(self) -> Iterator[nn.Module]:
        """The outermost modules that are still there."""
        return (module for reference in self._models if (module := reference()) is not None)

    def learn(self) -> None:
        """Names what joined the outermost modules since they were first seen."""
        for module in self.models():
            self._learn(module)

    def _learn(self, module: nn.Module) -> None:
        for prefix, child in module.named_modules():
            for name, tensor in child._parameters.items():
                if tensor is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                entry = self._names.get(id(tensor))
                if entry is None or entry[0]() is not tensor:
                    self._names[id(tensor)] = (weakref.ref(tensor), full, type(child).__name__)

    def of(self, tensor: torch.Tensor | ParameterState | None) -> str:
        """The name of a parameter in its model, or its shape."""
        if isinstance(tensor, ParameterState) and tensor.name:
            return tensor.name
        found = self.find(tensor)
        if found is None:
            return "a parameter" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
        return found[0]

    def owner_kind(self, tensor: torch.Tensor | ParameterState | None) -> str:
        """The class name of the module that holds a parameter; empty where unknown."""
        found = self.find(tensor)
        return "" if found is None else found[1]

    def find(self, tensor: torch.Tensor | ParameterState | None) -> tuple[str, str] | None:
        """Its name, and the class name of the module that holds it; None where unknown."""
        if isinstance(tensor, ParameterState):
            tensor = tensor.ref()
        if tensor is None:
            return None
        entry = self._names.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        return entry[1], entry[2]

    def first(self, states: Iterable[Any], most: int = 5) -> list[str]:
        """The first few names."""
        return [self.of(state) for state in itertools.islice(states, most)]
