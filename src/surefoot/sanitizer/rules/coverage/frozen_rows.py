"""Rows of a weight whose gradients are zeroed at every step, and whether a step moves them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.listener import Listener
from surefoot.sanitizer.state import OptimizerState, ParameterState

MOST_ROWS = 1 << 20
ROWS_KEPT = 64
MOST_WEIGHTS = 64
EVERY_STEP = 32


@dataclass
class Rows:
    """What is known of one weight."""

    optimizer: int
    name: str = ""
    fed: torch.Tensor | None = None
    """Rows that a backward pass of this window gave a gradient, or a lookup used."""
    zeroed: torch.Tensor | None = None
    """Rows that were so and had none at the step: at every step that was looked at."""
    values: torch.Tensor | None = None
    steps: int = 0
    moved: int = 0


class FrozenRows(Listener):
    """Follows weights whose gradients the user's own code changes, by hand or by a hook."""

    def setup(self) -> None:
        self.known: dict[int, Rows] = {}

    def on_embedding_called(self, event: ev.EmbeddingCalled) -> None:
        state = self.trace.parameters.find(event.weight) if is_hooked(event.weight) else None
        rows = None if state is None else self.known.get(state.key)
        if rows is None or event.ids.device.type != "cpu" or not torch.is_grad_enabled():
            return
        used = torch.zeros(len(event.weight), dtype=torch.bool)
        used[event.ids.reshape(-1)] = True
        if event.padding_idx is not None:
            used[event.padding_idx] = False
        rows.fed = used if rows.fed is None else rows.fed | used

    def on_backward_end(self, event: ev.BackwardEnd) -> None:
        for state in event.changed:
            rows, tensor = self.known.get(state.key), state.ref()
            if rows is not None and tensor is not None and not is_hooked(tensor):
                nonzero = _nonzero(tensor)
                if nonzero is not None:
                    rows.fed = nonzero if rows.fed is None else rows.fed | nonzero

    def before_step(self, optimizer: OptimizerState) -> None:
        """Looks which rows have no gradient although they were used."""
        n = optimizer.steps
        if n >= EVERY_STEP and n & (n - 1):
            return
        for state in optimizer.parameters:
            tensor = state.ref()
            if tensor is None or tensor.dim() < 2 or len(tensor) > MOST_ROWS:
                continue
            hooked = is_hooked(tensor)
            if hooked or state.touched:
                self._look(optimizer, state, tensor, hooked)

    def _look(
        self, optimizer: OptimizerState, state: ParameterState, tensor: torch.Tensor, hooked: bool
    ) -> None:
        if state.key not in self.known and len(self.known) >= MOST_WEIGHTS:
            return
        rows = self.known.setdefault(state.key, Rows(optimizer.key))
        fed, rows.fed = rows.fed, None
        nonzero = _nonzero(tensor)
        if nonzero is None or not bool(nonzero.any()):
            return
        if fed is None and hooked:
            fed = self._live(optimizer, tensor)
        if fed is None:
            return
        rows.zeroed = (fed if rows.zeroed is None else rows.zeroed) & ~nonzero
        rows.steps += 1
        rows.name = self.trace.names.of(tensor)
        rows.values = _some(tensor, rows.zeroed)

    def _live(self, optimizer: OptimizerState, tensor: torch.Tensor) -> torch.Tensor | None:
        # Behind a hook it cannot be seen what the gradient was: units whose bias has one live.
        name = self.trace.names.of(tensor).rpartition(".")[0] + ".bias"
        for state in optimizer.parameters:
            bias = state.ref()
            if bias is None or bias.shape != tensor.shape[:1] or is_hooked(bias):
                continue
            if self.trace.names.of(bias) == name:
                return _nonzero(bias)
        return None

    def after_step(self, optimizer: OptimizerState) -> None:
        """Looks whether the step moved them all the same."""
        for state in optimizer.parameters:
            rows, tensor = self.known.get(state.key), state.ref()
            if rows is None or rows.values is None or rows.zeroed is None or tensor is None:
                continue
            rows.moved += not torch.equal(rows.values, _some(tensor, rows.zeroed))
            rows.values = None


def is_hooked(tensor: torch.Tensor) -> bool:
    """Whether the user's hooks see, and may change, its gradients."""
    return bool(tensor._backward_hooks) or bool(
        getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


def _nonzero(tensor: torch.Tensor) -> torch.Tensor | None:
    gradient = tensor.grad
    if gradient is None or gradient.is_sparse or gradient.device.type != "cpu":
        return None
    return (gradient != 0).reshape(len(gradient), -1).any(1)


def _some(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[rows.nonzero().reshape(-1)[:ROWS_KEPT]].clone()
