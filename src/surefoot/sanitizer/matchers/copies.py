"""Models that no optimizer holds but that follow a trained one: averages, best or slow copies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim.swa_utils import AveragedModel

from surefoot.sanitizer.listener import Listener
from surefoot.sanitizer.matchers.leaves import some_values
from surefoot.sanitizer.names import parameters_of

MOST_MODULES = 1_000
LEAST_INTERVALS = 5
BUSY = 0.5
Shapes = tuple[tuple[int, ...], ...]


@dataclass
class _Copy:
    shapes: Shapes
    values: tuple[float, ...]
    moved: bool = False


class WeightCopies(Listener):
    """Tells which models follow a trained one."""

    def setup(self) -> None:
        self._seen: dict[int, _Copy] = {}
        self._trained: set[Shapes] = set()
        self._looked = 0

    def follows(self, module: nn.Module) -> bool:
        """Whether it has the shapes of a trained model and its weights change without a step."""
        if not self.trace.training_began:
            return False
        if isinstance(module, AveragedModel):
            return True
        tensor = next((p for p in parameters_of(module) if p.numel() > 1), None)
        if tensor is None:
            return False
        key, values = self.trace.module_key(module), some_values(tensor)
        seen = self._seen.get(key)
        if seen is None:
            if len(self._seen) < MOST_MODULES:
                self._seen[key] = _Copy(shapes_of(module), values)
            return False
        seen.moved = seen.moved or seen.values != values
        seen.values = values
        return seen.moved and seen.shapes in self._shapes_of_trained()

    def _shapes_of_trained(self) -> set[Shapes]:
        # Looked at again when the number of updates has doubled.
        if self.trace.updates >= 2 * self._looked:
            self._looked = self.trace.updates
            for module in self.trace.names.models():
                if self.trace.is_trained(module):
                    self._trained.add(shapes_of(module))
        return self._trained


def gives_targets(intervals: set[int], updates: int) -> bool:
    """Whether calls after these numbers of updates belong to the updates, not to an evaluation."""
    if len(intervals) < LEAST_INTERVALS:
        return False
    # A phase of the script in which nearly every update calls is enough.
    span = min(updates, max(intervals) - min(intervals) + 1)
    return len(intervals) > BUSY * span


def shapes_of(module: nn.Module) -> Shapes:
    """The shapes of its parameters: a model and its copies have the same."""
    return tuple(tuple(parameter.shape) for parameter in parameters_of(module))
