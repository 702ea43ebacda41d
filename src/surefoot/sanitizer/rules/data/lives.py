"""Lives of models: from an initialisation through all updates, until it is initialised anew."""

from __future__ import annotations

import itertools

from torch import nn

from surefoot.sanitizer.listener import Listener
from surefoot.sanitizer.matchers.leaves import some_values
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.state import OptimizerState, ParameterState

MOST_MODULES = 1_000


class Lives(Listener):
    """Gives each outermost model a number, and a new one when its training starts afresh.

    It does where an optimizer begins whose weights are not as the last one left them, and where
    the weights are put back to what they were at first.
    """

    def setup(self) -> None:
        self._numbers = itertools.count(1)
        self._life: dict[int, int] = {}
        self._members: dict[int, frozenset[int]] = {}
        self._first: dict[int, tuple[float, ...]] = {}
        """Values of a parameter before the first update of a model."""
        self._left: dict[int, int] = {}
        """Version of a parameter after the latest step that moved it."""

    def of(self, key: int) -> int:
        """The present life of the model with this key."""
        life = self._life.get(key)
        if life is None:
            life = self._life[key] = next(self._numbers)
        return life

    def know(self, module: nn.Module) -> frozenset[int]:
        """Keys of the parameters of a model that optimizers hold."""
        key = self.trace.module_key(module)
        if not self._members.get(key) and len(self._members) < MOST_MODULES:
            found = (self.trace.parameters.find(tensor) for tensor in parameters_of(module))
            self._members[key] = frozenset(state.key for state in found if state is not None)
        if key not in self._first and len(self._first) < MOST_MODULES:
            self._first[key] = _values(module)
        return self._members.get(key, frozenset())

    def sharing(self, members: frozenset[int]) -> list[int]:
        """The lives of all models with some of these parameters."""
        return [self.of(key) for key, others in self._members.items() if others & members]

    def restored(self, module: nn.Module) -> None:
        """State was loaded into a model."""
        key = self.trace.module_key(module)
        if key in self._first and self._first[key] == _values(module):
            self._life[key] = next(self._numbers)

    def before_step(self, optimizer: OptimizerState) -> None:
        """Looks whether the first step of an optimizer starts from other weights."""
        witness = None if optimizer.has_stepped else _witness(optimizer)
        if witness is None or witness.key not in self._left:
            return
        tensor = witness.ref()
        if tensor is not None and tensor._version != self._left[witness.key]:
            for key, members in self._members.items():
                if witness.key in members:
                    self._life[key] = next(self._numbers)

    def after_step(self, optimizer: OptimizerState) -> None:
        """Remembers how an optimizer leaves the weights."""
        witness = _witness(optimizer)
        tensor = None if witness is None else witness.ref()
        if witness is not None and tensor is not None and len(self._left) < MOST_MODULES:
            self._left[witness.key] = tensor._version


def _witness(optimizer: OptimizerState) -> ParameterState | None:
    return next((state for state in optimizer.parameters if len(state.shape) > 1), None)


def _values(module: nn.Module) -> tuple[float, ...]:
    return next((some_values(tensor) for tensor in parameters_of(module) if tensor.dim() > 1), ())
