"""The ledger of gradient buffers: which backward passes each holds, and who changed it.

A change is put down to the known call that is running, or to the user's own code.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from surefoot.sanitizer import graph
from surefoot.sanitizer.state import OptimizerState, ParameterState, Table

WITNESSED = 6
SCALED = 0.01
"""Values that were scaled together agree to half precision."""


class GradientLedger:
    """What is known of the gradients of all parameters that optimizers hold."""

    def __init__(
        self, optimizers: Table[torch.optim.Optimizer, OptimizerState], causes: Sequence[str]
    ) -> None:
        self.optimizers = optimizers
        self.causes = causes
        """Known calls that are running, outermost first."""
        self.parameters: Table[torch.Tensor, ParameterState] = Table()
        self._held: list[list[ParameterState]] = []
        self._all: list[ParameterState] = []

    def parameter(self, tensor: torch.Tensor) -> ParameterState:
        state = self.parameters.find(tensor)
        if state is None:
            key = self.parameters.next_key()
            state = self.parameters.add(tensor, ParameterState(tensor, key))
        return state

    def refresh(self, optimizer: OptimizerState) -> None:
        """Takes up parameters that were added to an optimizer or replaced in it."""
        tensors = [tensor for group in optimizer.groups() for tensor in group["params"]]
        known = optimizer.parameters
        if len(known) != len(tensors) or any(
            state.ref() is not tensor for state, tensor in zip(known, tensors, strict=True)
        ):
            optimizer.parameters = [self.parameter(tensor) for tensor in tensors]
            several = [state for state in optimizer.parameters if state.numel > 1]
            if several:
                smallest = min(several, key=lambda state: state.numel)
                smallest.witness = smallest.witness or ()

    def observe(self, states: Iterable[ParameterState]) -> list[ParameterState]:
        """Compares gradient buffers with what was last seen; returns those that changed."""
        cause = self.causes[-1] if self.causes else "user"
        changed, by_hand = [], []
        for state in states:
            tensor = state.ref()
            if tensor is None:
                continue
            gradient = tensor.grad
            if gradient is None:
                if state.grad_id:
                    state.grad_id, state.grad_version = 0, -1
                    state.contributions = state.used = 0
                    state.unknown = state.scale_pending = False
                    changed.append(state)
                continue
            identity, version = id(gradient), gradient._version
            if identity == state.grad_id and version == state.grad_version:
                continue
            fresh = state.grad_id == 0
            state.grad_id, state.grad_version = identity, version
            changed.append(state)
            if cause == "user":
                by_hand.append((state, gradient))
            else:
                self._account(state, cause, fresh)
                state.witness = None if state.witness is None else _first_values(gradient)
        if by_hand:
            self._account_by_hand(by_hand)
        return changed

    def _account_by_hand(self, changed: Sequence[tuple[ParameterState, torch.Tensor]]) -> None:
        """The user's own code changed gradients: cleared them, scaled them, or anything else."""
        scaled = False
        for state, gradient in changed:
            if state.witness is not None:
                before, state.witness = state.witness, _first_values(gradient)
                # Scaled after use is a momentum of the user's own making.
                is_fresh = state.contributions > state.used
                scaled = scaled or (is_fresh and _is_scaled(before, state.witness))
        for state, gradient in changed:
            state.touched = True
            if not graph.is_readable(gradient):
                state.unknown = True
            elif not bool(gradient.any()):
                state.contributions = state.used = 0
                state.unknown = False
            elif scaled:
                state.scale_pending = False
            else:
                state.unknown = True

    def changed_by_collective(self, states: Iterable[ParameterState]) -> None:
        """Gradients were summed over ranks, which no version of a tensor tells."""
        for state in states:
            self.observe([state])
            tensor = state.ref()
            if state.witness is not None and tensor is not None and tensor.grad is not None:
                state.witness = _first_values(tensor.grad)

    def _account(self, state: ParameterState, cause: str, fresh: bool) -> None:
        if cause == "backward":
            state.contributions = 1 if fresh else state.contributions + 1
            state.backwards += 1
        elif cause == "zero":
            state.contributions = state.used = 0
            state.unknown = state.scale_pending = False

    def all_parameters(self) -> Sequence[ParameterState]:
        """Each parameter of the optimizers that are alive, once."""
        held = [o.parameters for o in self.optimizers if o.ref() is not None]
        # Asked for at every backward pass: made anew only when an optimizer's list is another.
        if len(held) != len(self._held) or any(map(operator.is_not, held, self._held)):
            self._held = held
            self._all = list({state.key: state for states in held for state in states}.values())
        return self._all


def _first_values(gradient: torch.Tensor) -> tuple[float, ...]:
    if not graph.is_readable(gradient) or gradient.is_complex():
        return ()
    values: list[float] = gradient.detach().reshape(-1)[:WITNESSED].tolist()
    return tuple(values)


def _is_scaled(before: tuple[float, ...], after: tuple[float, ...]) -> bool:
    """Whether all values were multiplied by one positive number."""
    ratios = [b / a for a, b in zip(before, after, strict=False) if a]
    zeros = [b for a, b in zip(before, after, strict=False) if not a]
    if len(ratios) < 2 or any(zeros) or ratios[0] <= 0:
        return False
    return all(abs(ratio - ratios[0]) <= SCALED * ratios[0] for ratio in ratios)
