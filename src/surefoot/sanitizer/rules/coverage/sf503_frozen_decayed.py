"""SF503: parameters with zeroed gradients move."""

from __future__ import annotations

from collections import defaultdict

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


class FrozenDecayed(Rule, page=__file__):
    """A parameter whose gradient is zero at every step still changes at S."""

    def setup(self) -> None:
        self.before: dict[int, list[tuple[ParameterState, torch.Tensor]]] = {}
        self.moved: dict[int, int] = defaultdict(int)
        self.fed: set[int] = set()
        self.names: dict[int, str] = {}
        self.steps: dict[int, int] = defaultdict(int)
        self.asks_not: set[int] = set()
        """Parameters that asked for no gradient when they were last changed."""
        self.rows = self.use(FrozenRows)

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
                self.fed.add(state.key)
                # A gradient that is zero by chance now and then freezes nothing.
                self.moved.pop(state.key, None)
            elif by_hook or (state.grad_id and not state.contributions and not state.unknown):
                zeroed.append(state)
        if not fed or not zeroed or len(self.moved) > 10_000:
            return
        kept = []
        for state in zeroed[:MOST_PARAMETERS]:
            tensor = state.ref()
            if tensor is not None and tensor.device.type == "cpu":
                kept.append((state, sample_of(tensor, SAMPLE)))
        self.before[optimizer.key] = kept

    def on_step_end(self, event: ev.StepEnd) -> None:
        self.rows.after_step(event.optimizer)
        kept = self.before.pop(event.optimizer.key, None)
        if kept is None:
            return
        self.steps[event.optimizer.key] += 1
        for state, values in kept:
            tensor = state.ref()
            if tensor is not None and not torch.equal(values, sample_of(tensor, SAMPLE)):
                self.moved[state.key] += 1
                (self.asks_not.discard if tensor.requires_grad else self.asks_not.add)(state.key)
                self.names[state.key] = self.trace.names.of(tensor)

    def findings(self) -> Findings:
        for optimizer in (o for o in self.trace.optimizers if o.steps):
            moved = [
                s
                for s in optimizer.parameters
                if self.moved.get(s.key, 0) >= max(1, min(LEAST, optimizer.steps))
            ]
            yield from self._of_rows(optimizer)
            never = [s for s in moved if s.key not in self.fed]
            never = never or [s for s in moved if self.stays_frozen(s, optimizer)]
            chosen = never or moved
            if not chosen:
                continue
            count = max(self.moved[s.key] for s in chosen)
            decays = sorted(set(optimizer.decays))
            names = [self.names[s.key] for s in chosen]
            message = (
                f"{len(chosen)} parameters had a gradient of zero and were changed all the same by"
                f" {optimizer.kind} (weight decay {', '.join(f'{d:g}' for d in decays)}) in"
                f" {share(count, optimizer.steps)} updates: {listed(names)}."
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

    def stays_frozen(self, state: ParameterState, optimizer: OptimizerState) -> bool:
        """Whether it asks for no gradient and decays for longer than its momentum lasts."""
        tensor = state.ref()
        asks_not = state.key in self.asks_not if tensor is None else not tensor.requires_grad
        return asks_not and any(optimizer.decays) and self.moved[state.key] >= LONG

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


def _is_zeroed_by_hook(state: ParameterState) -> bool:
    tensor = state.ref()
    if tensor is None or tensor.grad is None or not is_hooked(tensor):
        return False
    readable = tensor.device.type == "cpu" and not tensor.grad.is_sparse
    return readable and not bool(tensor.grad.any())
