"""SF511: updates are smaller than the format of the weights can hold."""

from __future__ import annotations

from collections import defaultdict

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import listed, sample_of
from surefoot.sanitizer.rules.base import Findings, Rule, share
from surefoot.sanitizer.rules.coverage.remainders import keeps_remainder
from surefoot.sanitizer.state import OptimizerState, ParameterState

FIRST = 6
MOST_PARAMETERS = 32
LOST = 0.6
"""Share of elements with a gradient that did not move."""
LEAST = 3
LOOK_BACK = 8
FEW = 0.1
STILL = 0.95
PART = 0.72
Sampled = tuple[ParameterState, torch.Tensor, torch.Tensor]


class LowPrecisionUpdateLost(Rule, page=__file__):
    """S with gradient and LR leaves most elements of a bf16 / fp16 parameter bit-identical."""

    def setup(self) -> None:
        self.before: dict[int, list[Sampled]] = {}
        self.lost: dict[int, list[float]] = defaultdict(list)
        self.first: dict[int, list[Sampled]] = {}
        self.rest: dict[int, list[float]] = defaultdict(list)
        """Per optimizer: shares of what had a gradient at first and never moved, ever later."""
        self.names: dict[int, list[str]] = {}
        self.dtype: dict[int, str] = {}

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer, n = event.optimizer, event.optimizer.steps
        if not (n < FIRST or n & (n - 1) == 0) or event.closure:
            return
        rates = optimizer.rates()
        if rates and max(rates) == 0:
            return
        kept: list[Sampled] = []
        for state in optimizer.parameters:
            if state.dtype not in (torch.bfloat16, torch.float16):
                continue
            tensor = state.ref()
            if tensor is None or tensor.grad is None or tensor.grad.is_sparse:
                continue
            if len(kept) < MOST_PARAMETERS:
                kept.append((state, sample_of(tensor), sample_of(tensor.grad) != 0))
        if kept:
            self.first.setdefault(optimizer.key, kept)
            self.before[optimizer.key] = kept

    def on_step_end(self, event: ev.StepEnd) -> None:
        kept = self.before.pop(event.optimizer.key, None)
        if kept is None:
            return
        still = fed = 0
        names = []
        optimizer = event.optimizer.ref()
        for state, values, has_gradient in kept:
            tensor = state.ref()
            if tensor is None or optimizer is None or keeps_remainder(optimizer, tensor):
                continue
            same = (sample_of(tensor) == values) & has_gradient
            still += int(same.sum())
            fed += int(has_gradient.sum())
            names.append(self.trace.names.of(tensor))
        if fed:
            self.lost[event.optimizer.key].append(still / fed)
            self.names[event.optimizer.key] = names
            self._look_back(event.optimizer)
            self.dtype[event.optimizer.key] = str(kept[0][0].dtype).removeprefix("torch.")

    def _look_back(self, optimizer: OptimizerState) -> None:
        if optimizer.steps < LOOK_BACK:
            return
        resting = fed = 0
        for state, values, has_gradient in self.first[optimizer.key]:
            tensor = state.ref()
            if tensor is not None:
                resting += int(((sample_of(tensor) == values) & has_gradient).sum())
                fed += int(has_gradient.sum())
        self.rest[optimizer.key].append(resting / max(1, fed))

    def _all_move(self, optimizer: OptimizerState) -> bool:
        # Rounded at random, or with what was lost kept somewhere: ever fewer weights never moved,
        # far fewer than rest in any one step. A rate that rises has the one, not the other.
        rest, lost = self.rest[optimizer.key], self.lost[optimizer.key]
        if len(rest) < 2:
            return False
        return rest[-1] < FEW or (rest[-1] < STILL * rest[-2] and rest[-1] < PART * min(lost))

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            shares = self.lost.get(optimizer.key, [])
            bad = [value for value in shares if value >= LOST]
            if len(bad) < LEAST or len(bad) < 0.6 * len(shares):
                continue
            if self._all_move(optimizer):
                continue
            rate = max(optimizer.rates(), default=0.0)
            message = (
                f"In {share(len(bad), len(shares))} sampled steps of {optimizer.kind} at lr"
                f" {rate:g}, {min(bad):.0%} to {max(bad):.0%} of the {self.dtype[optimizer.key]}"
                " weights with a gradient stayed bit-identical:"
                f" {listed(self.names[optimizer.key], 4)}."
            )
            yield self.report(
                message,
                optimizer.last_step_site,
                sampled_steps=len(shares),
                lost_shares=shares[:20],
                lr=rate,
            )
