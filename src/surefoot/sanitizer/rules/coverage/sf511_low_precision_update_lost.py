"""SF511: updates are smaller than the format of the weights can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.matchers.leaves import listed, sample_of
from surefoot.sanitizer.rules.base import Findings, Rule, share
from surefoot.sanitizer.rules.coverage.remainders import keeps_remainder
from surefoot.sanitizer.state import ParameterState

FIRST = 6
MOST_PARAMETERS = 32
LOST = 0.6
"""Share of elements with a gradient that did not move."""
MOSTLY = 0.6
"""Share of the sampled steps that lose as much."""
LEAST = 3
LOOK_BACK = 8
"""Updates from which it is looked at what never moved."""
FEW = 0.1
SHRINKS = 0.95
RESTS = 0.72
Sampled = tuple[ParameterState, torch.Tensor, torch.Tensor]
"""A parameter, values of it, and which of them had a gradient."""


@dataclass
class _HalfPrecision:
    """What is known of the half-precision weights of one optimizer."""

    first: list[Sampled]
    before: list[Sampled] = field(default_factory=list)
    """As they were before the step that runs, where it is looked at."""
    lost: list[float] = field(default_factory=list)
    """Shares of values with a gradient that a step left as they were."""
    rest: list[float] = field(default_factory=list)
    """Shares of what had a gradient at first and never moved, ever later."""
    names: list[str] = field(default_factory=list)
    dtype: str = ""

    @property
    def all_move(self) -> bool:
        # Rounded at random, or with what was lost kept somewhere: ever fewer weights never moved,
        # far fewer than rest in any one step. A rate that rises has the one, not the other.
        if len(self.rest) < 2:
            return False
        before, now = self.rest[-2:]
        return now < FEW or (now < SHRINKS * before and now < RESTS * min(self.lost))


class LowPrecisionUpdateLost(Rule, page=__file__):
    """A step leaves most elements of half-precision weights with a gradient bit-identical."""

    def setup(self) -> None:
        self.seen: dict[int, _HalfPrecision] = {}

    def on_step_begin(self, event: ev.StepBegin) -> None:
        optimizer, n = event.optimizer, event.optimizer.steps
        rates = optimizer.rates()
        is_sampled = n < FIRST or n & (n - 1) == 0
        if not is_sampled or event.closure or (rates and max(rates) == 0):
            return
        kept: list[Sampled] = []
        for state in optimizer.parameters:
            tensor = state.ref() if state.dtype in (torch.bfloat16, torch.float16) else None
            if tensor is None or tensor.grad is None or tensor.grad.is_sparse:
                continue
            if len(kept) < MOST_PARAMETERS:
                kept.append((state, sample_of(tensor), sample_of(tensor.grad) != 0))
        if kept:
            self.seen.setdefault(optimizer.key, _HalfPrecision(kept)).before = kept

    def on_step_end(self, event: ev.StepEnd) -> None:
        seen, optimizer = self.seen.get(event.optimizer.key), event.optimizer.ref()
        if seen is None or not seen.before or optimizer is None:
            return
        kept, seen.before = seen.before, []
        tensors = [(sample, sample[0].ref()) for sample in kept]
        plain = [s for s, t in tensors if t is not None and not keeps_remainder(optimizer, t)]
        lost = _unmoved(plain)
        if lost is None:
            return
        seen.lost.append(lost)
        seen.names = [self.trace.names.of(state) for state, _, _ in plain]
        seen.dtype = str(kept[0][0].dtype).removeprefix("torch.")
        if event.optimizer.steps >= LOOK_BACK:
            seen.rest.append(_unmoved(seen.first) or 0.0)

    def findings(self) -> Findings:
        for optimizer in self.trace.optimizers:
            seen = self.seen.get(optimizer.key)
            bad = [value for value in seen.lost if value >= LOST] if seen is not None else []
            if seen is None or len(bad) < max(LEAST, MOSTLY * len(seen.lost)) or seen.all_move:
                continue
            rate = max(optimizer.rates(), default=0.0)
            message = (
                f"In {share(len(bad), len(seen.lost))} sampled steps of {optimizer.kind} at lr"
                f" {rate:g}, {min(bad):.0%} to {max(bad):.0%} of the {seen.dtype} weights with a"
                f" gradient stayed bit-identical: {listed(seen.names, 4)}."
            )
            yield self.report(
                message,
                optimizer.last_step_site,
                sampled_steps=len(seen.lost),
                lost_shares=seen.lost[:20],
                lr=rate,
            )


def _unmoved(sampled: Sequence[Sampled]) -> float | None:
    """Share of the values with a gradient that are as they were; None without any."""
    still = fed = 0
    for state, values, has_gradient in sampled:
        tensor = state.ref()
        if tensor is not None:
            still += int(((sample_of(tensor) == values) & has_gradient).sum())
            fed += int(has_gradient.sum())
    return still / fed if fed else None
