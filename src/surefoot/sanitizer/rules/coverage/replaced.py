"""Weights that took the place of others which an optimizer still holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from surefoot.sanitizer.listener import Listener
from surefoot.sanitizer.matchers.leaves import some_values
from surefoot.sanitizer.state import OptimizerState, ParameterState
from surefoot.sanitizer.trace import Trace

MOST = 64
Values = tuple[float, ...]


@dataclass
class Replaced:
    """What was seen of one optimizer."""

    looks: int = 0
    first: int = 0
    """Steps of the optimizer before the first of them."""
    names: list[str] = field(default_factory=list)
    """The weights in use, where the model has names for them."""
    old: int = 0
    """How many weights it holds that no model has any more."""
    before: dict[int, tuple[weakref.ref[torch.Tensor], Values]] = field(default_factory=dict)


class Replacements(Listener):
    """Finds, per optimizer, weights that left the model and those that came for them."""

    def setup(self) -> None:
        self.seen: dict[int, Replaced] = {}

    def look(
        self, optimizer: OptimizerState, reached: set[int], strangers: Sequence[torch.Tensor]
    ) -> None:
        """Takes in a graph that reaches weights of an optimizer and some that nobody holds."""
        unused = [s for s in optimizer.parameters if s.key not in reached and not s.unknown]
        if not unused:
            return
        names: dict[int, str] = {}
        for module in self.trace.names.models():
            names |= {id(tensor): name for name, tensor in module.named_parameters()}
        gone = [(s, t) for s in unused if (t := s.ref()) is not None and id(t) not in names]
        new = [tensor for tensor in strangers if id(tensor) in names]
        pairs = [(t, s) for t in new if (s := _match(t, names[id(t)], gone, self.trace))]
        if not pairs:
            return
        entry = self.seen.setdefault(optimizer.key, Replaced(first=optimizer.steps))
        if any(self._moved(entry, tensor) for tensor, _ in pairs):
            # Somebody trains them all the same, by hand.
            self.seen[optimizer.key] = Replaced(first=optimizer.steps)
            return
        entry.looks += 1
        entry.names = [names[id(tensor)] for tensor, _ in pairs][:MOST]
        entry.old = len(gone)

    def _moved(self, entry: Replaced, tensor: torch.Tensor) -> bool:
        known = entry.before.get(id(tensor))
        values = some_values(tensor)
        if known is None or known[0]() is not tensor:
            if len(entry.before) < MOST:
                entry.before[id(tensor)] = weakref.ref(tensor), values
            return False
        return known[1] != values


def _match(
    tensor: torch.Tensor,
    name: str,
    gone: Iterable[tuple[ParameterState, torch.Tensor]],
    trace: Trace,
) -> ParameterState | None:
    """The weight whose place a tensor took: it had the same name, or nearly the same shape."""
    shape = tuple(tensor.shape)
    for state, _ in gone:
        differ = sum(a != b for a, b in zip(state.shape, shape, strict=False))
        is_alike = len(state.shape) == len(shape) and differ <= 1
        if is_alike or trace.names.of(state) == name:
            return state
    return None
