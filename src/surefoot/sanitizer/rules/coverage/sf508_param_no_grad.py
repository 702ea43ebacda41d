"""SF508: a parameter in the optimizer never gets a gradient."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import listed
from surefoot.sanitizer.rules.base import Certainty, Finding, Findings, Rule
from surefoot.sanitizer.state import OptimizerState, ParameterState

LEAST = 3
LOOKS = range(3, 12)


class ParamNoGrad(Rule, page=__file__):
    """Parameter in a stepping optimizer, requires_grad, never receives a gradient."""

    def setup(self) -> None:
        self.called: dict[int, weakref.ref[torch.Tensor]] = {}
        self.calls: set[int] = set()
        self.asking: dict[int, dict[int, bool]] = {}
        """Per optimizer: parameters without gradient so far; whether their module was called."""

    def _called(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and len(self.called) < 1_000_000:
                self.called[id(parameter)] = weakref.ref(parameter)

    def on_submodule_first_called(self, event: ev.SubmoduleFirstCalled) -> None:
        self._called(event.module)

    def on_forward_end(self, event: ev.ForwardEnd) -> None:
        key = self.trace.module_key(event.module)
        if key not in self.calls:
            self.calls.add(key)
            self._called(event.module)

    def on_step_end(self, event: ev.StepEnd) -> None:
        optimizer, n = event.optimizer, event.optimizer.steps
        # Looked at while the parameters are there: at the end the model may be gone.
        if n in LOOKS or n & (n - 1) == 0:
            self.asking[optimizer.key] = {
                state.key: self._was_called(state)
                for state in optimizer.parameters
                if self._without_gradient(state)
            }

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            if optimizer.steps < LEAST:
                continue
            fed = any(state.backwards for state in optimizer.parameters)
            asking = self.asking.get(optimizer.key, {})
            without = [
                s
                for s in optimizer.parameters
                if s.key in asking and not s.backwards and not s.grad_id
            ]
            called = [s for s in without if asking[s.key]]
            idle = [s for s in without if not asking[s.key]]
            if called:
                yield self._finding(optimizer, called, Certainty.PROOF)
            # Nothing fed at all: a loop that only draws a schedule steps so on purpose.
            if idle and fed:
                yield self._finding(optimizer, idle, Certainty.HEURISTIC)

    def _without_gradient(self, state: ParameterState) -> bool:
        tensor = state.ref()
        return (
            tensor is not None
            and tensor.requires_grad
            and not state.backwards
            and not state.grad_id
            and not state.touched
        )

    def _was_called(self, state: ParameterState) -> bool:
        tensor = state.ref()
        entry = self.called.get(id(tensor)) if tensor is not None else None
        return entry is not None and entry() is tensor

    def _finding(
        self, optimizer: OptimizerState, states: list[ParameterState], certainty: Certainty
    ) -> Finding:
        names = [self.trace.names.of(state) for state in states]
        how = "was called" if certainty is Certainty.PROOF else "was never called by itself"
        message = (
            f"{len(states)} parameters of {optimizer} got no gradient in {optimizer.steps} updates"
            f" (their module {how}): {listed(names)}."
        )
        return self.report(
            message,
            optimizer.last_backward_site,
            certainty=certainty,
            updates=optimizer.steps,
            parameters=names[:50],
        )
