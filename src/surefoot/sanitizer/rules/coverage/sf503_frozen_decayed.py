"""SF503: parameters with zeroed gradients move."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import listed, sample_of
from surefoot.sanitizer.rules.base import Certainty, Findings, Rule, share
from surefoot.sanitizer.rules.coverage.frozen_rows import FrozenRows, is_hooked
from surefoot.sanitizer.state import OptimizerState, ParameterState

SAMPLE = 256
MOST_PARAMETERS = 64
LEAST = 3
LEAST_OF_ROWS = 6
LONG = 8


@dataclass
class _Weight:
    """A parameter of whose gradients some were zeroed."""

    moved: int = 0
    """Steps that changed it although its gradient was zero, since it last had another one."""
    trained: bool = False
    """Whether it ever had a gradient that was not zero."""
    asks: bool = True
    """Whether it asked for a gradient when it was last changed."""
    name: str = ""


class FrozenDecayed(Rule, page=__file__):
    """A step changes a parameter whose gradient was set to zero."""

    def setup(self) -> None:
        self.rows = self.use(FrozenRows)
        self.weights: dict[int, _Weight] = defaultdict(_Weight)
        self.before: dict[int, list[tuple[ParameterState, torch.Tensor]]] = {}
        """By optimizer: values of parameters with zeroed gradients before the step that runs."""

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer = event.optimizer
        if event.closure or event.inside_backward:
            return
        self.rows.before_step(optimizer)
        zeroed, fed = [], False
        for state in optimizer.parameters:
            by_hook = state.contributions > state.used and _is_zeroed_by_hook(state)
            if state.contributions > state.used and not by_hook:
                fed = True
                weight = self.weights[state.key]
                # A gradient that is zero by chance now and then freezes nothing.
                weight.trained, weight.moved = True, 0
            elif by_hook or (state.grad_id and not state.contributions and not state.unknown):
                zeroed.append(state)
        if fed and zeroed:
            tensors = [(state, state.ref()) for state in zeroed[:MOST_PARAMETERS]]
            self.before[optimizer.key] = [
                (state, sample_of(tensor, SAMPLE))
                for state, tensor in tensors
                if tensor is not None and tensor.device.type == "cpu"
            ]

    def on_step_end(self, event: ev.StepEnd) -> None:
        self.rows.after_step(event.optimizer)
        for state, values in self.before.pop(event.optimizer.key, ()):
            tensor = state.ref()
            if tensor is not None and not torch.equal(values, sample_of(tensor, SAMPLE)):
                weight = self.weights[state.key]
                weight.moved += 1
                weight.asks = tensor.requires_grad
                weight.name = self.trace.names.of(tensor)

    def findings(self) -> Findings:
        for optimizer in (o for o in self.trace.optimizers if o.steps):
            yield from self._of_rows(optimizer)
            least = max(1, min(LEAST, optimizer.steps))
            pairs = [
                (s, self.weights[s.key]) for s in optimizer.parameters if s.key in self.weights
            ]
            moved = [(state, weight) for state, weight in pairs if weight.moved >= least]
            never = [weight for _, weight in moved if not weight.trained]
            never = never or [w for s, w in moved if _stays_frozen(s, w, optimizer)]
            chosen = never or [weight for _, weight in moved]
            if not chosen:
                continue
            count, names = max(w.moved for w in chosen), [weight.name for weight in chosen]
            decays = ", ".join(f"{decay:g}" for decay in sorted(set(optimizer.decays)))
            message = (
                f"{len(chosen)} parameters had a gradient of zero and were changed all the same by"
                f" {optimizer.kind} (weight decay {decays}) in {share(count, optimizer.steps)}"
                f" updates: {listed(names)}."
            )
            yield self.report(
                message,
                optimizer.last_step_site,
                certainty=Certainty.STRONG if never else Certainty.HEURISTIC,
                updates=optimizer.steps,
                changed=count,
                parameters=names[:20],
                trained_before=not never,
            )

    def _of_rows(self, optimizer: OptimizerState) -> Findings:
        for rows in self.rows.known.values():
            if rows.optimizer != optimizer.key or rows.zeroed is None:
                continue
            count = int(rows.zeroed.sum())
            if not count or rows.moved < max(1, min(LEAST_OF_ROWS, rows.steps)):
                continue
            message = (
                f"{count} rows of {rows.name} had their gradients zeroed in all of {rows.steps}"
                f" steps that were looked at, and {optimizer.kind} changed them in {rows.moved}."
            )
            yield self.report(
                message,
                optimizer.last_step_site,
                rows=count,
                steps=rows.steps,
                changed=rows.moved,
                fix="Put the rows back after each step, or keep them in a parameter of their own.",
            )


def _stays_frozen(state: ParameterState, weight: _Weight, optimizer: OptimizerState) -> bool:
    """Whether it asks for no gradient and decays for longer than its momentum lasts."""
    tensor = state.ref()
    asks = weight.asks if tensor is None else tensor.requires_grad
    return not asks and any(optimizer.decays) and weight.moved >= LONG


def _is_zeroed_by_hook(state: ParameterState) -> bool:
    tensor = state.ref()
    if tensor is None or tensor.grad is None or not is_hooked(tensor):
        return False
    readable = tensor.device.type == "cpu" and not tensor.grad.is_sparse
    return readable and not bool(tensor.grad.any())
