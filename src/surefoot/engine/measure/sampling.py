"""Measures that are too dear for every update: taken on every n-th window, by a pass and the
signals.

Which window is sampled is a function of its number, so a resumed run samples the same ones. An
update that is sampled computes the same weights as one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from surefoot.data.batch import MicroBatch
from surefoot.engine.in_flight import DETAIL
from surefoot.engine.measure.device_clock import DeviceClock
from surefoot.engine.passes import Pass
from surefoot.numerics.clipping import tensor_norms
from surefoot.numerics.loss_scaling import LossScale
from surefoot.numerics.measures import UnitWatch, copies, update_ratio
from surefoot.numerics.modes import ModeWatch

MOST_COPIED_ELEMENTS = 1 << 22
"""Weights that are copied to measure how far an update moves them: 16 MiB in float32."""
MOST_LAYERS = 64
"""Parameters whose norms are recorded one by one."""


@dataclass
class Sampling:
    """What is measured on a sampled window.

    Args:
        every: one window in so many is sampled, halfway between multiples of it, where evaluations
            and saves seldom fall.
        next_window: number of the window that is about to be passed.
        parameters: trainable parameters by name whose values lie whole on this rank.
        layers: patterns of the names whose norms are recorded one by one.
        optimizer: marks its step on the clock.
        modes: compared with those at the start.
        units: None where activations cannot be seen, as in compiled code.
        clock: None on a device without events.
    """

    every: int
    next_window: Callable[[], int]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    layers: Sequence[str] = ()
    optimizer: torch.optim.Optimizer | None = None
    modes: ModeWatch | None = None
    units: UnitWatch | None = None
    clock: DeviceClock | None = None
    is_on: bool = field(default=False, init=False)
    """Whether the update under way is sampled."""
    loads: Callable[[], Mapping[str, Tensor]] = field(default=dict, init=False)
    """Further numbers of a window: the loads of experts. Every rank asks alike."""

    def __post_init__(self) -> None:
        self._watched = watched(list(self.parameters.values()))
        self._named = [
            (name, parameter)
            for name, parameter in self.parameters.items()
            if any(fnmatchcase(name, pattern) for pattern in self.layers)
        ][:MOST_LAYERS]
        self._before: list[Tensor] = []

    def begin_if_due(self) -> bool:
        """Whether the next window is sampled. The one before ends its time on the device here."""
        if self.clock is not None and self.clock.is_open:
            self.clock.end()
        self.is_on = (self.next_window() - self.every // 2) % self.every == 0
        return self.is_on

    def before_step(self) -> dict[str, Tensor]:
        """Takes what must be taken before the weights move: gradients are whole and unclipped."""
        self._before = copies(self._watched) if self._watched else []
        if self.clock is not None and self.optimizer is not None:
            self._mark_step(self.optimizer, self.clock)
        norms = self._norms("grad_norm", [p for _, p in self._named], lambda p: p.grad)
        return {**norms, **{f"{DETAIL}{name}": value for name, value in self.loads().items()}}

    def after_step(self) -> dict[str, Tensor]:
        """Takes the rest; the update is no longer sampled."""
        self.is_on = False
        if self.clock is not None:
            self.clock.mark("between")
        found = self._norms("weight_norm", [p for _, p in self._named], lambda p: p.detach())
        if self._before:
            found[f"{DETAIL}update_ratio"] = update_ratio(self._before, self._watched)
            self._before = []
        return found

    def _norms(
        self, kind: str, parameters: list[Tensor], of: Callable[[Tensor], Tensor | None]
    ) -> dict[str, Tensor]:
        tensors = [(name, of(p)) for (name, _), p in zip(self._named, parameters, strict=True)]
        there = [(name, tensor) for name, tensor in tensors if tensor is not None]
        if not there:
            return {}
        norms = tensor_norms([tensor for _, tensor in there]).unbind()
        return {
            f"{DETAIL}{kind}/{name}": norm for (name, _), norm in zip(there, norms, strict=True)
        }

    @staticmethod
    def _mark_step(optimizer: torch.optim.Optimizer, clock: DeviceClock) -> None:
        def mark(*_: object) -> None:
            handle.remove()
            clock.mark("optimizer")

        handle = optimizer.register_step_pre_hook(mark)


def watched(parameters: Sequence[Tensor], most: int = MOST_COPIED_ELEMENTS) -> list[Tensor]:
    """Parameters over the whole depth of the model, of at most `most` elements together.

    All of them where they fit; else the middle one, then those at a quarter of the way, and so on,
    as long as they fit.
    """
    if sum(p.numel() for p in parameters) <= most:
        return list(parameters)
    chosen: set[int] = set()
    left = most
    step = len(parameters)
    while step > 1:
        step = (step + 1) // 2
        for index in range(step, len(parameters), step):
            if index not in chosen and parameters[index].numel() <= left:
                chosen.add(index)
                left -= parameters[index].numel()
    return [parameters[index] for index in sorted(chosen)]


class SampledPass:
    """A pass that, on sampled windows, also looks at modes, units and the device's clock."""

    def __init__(self, run_pass: Pass, sampling: Sampling) -> None:
        self._run_pass = run_pass
        self._sampling = sampling

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        if not self._sampling.begin_if_due():
            return self._run_pass(micro_batches, denominators, loss_scale)
        return self._sample(micro_batches, denominators, loss_scale)

    def _sample(
        self,
        micro_batches: Sequence[MicroBatch],
        denominators: Mapping[str, float],
        loss_scale: LossScale,
    ) -> dict[str, Tensor]:
        sampling = self._sampling
        if sampling.modes is not None:
            sampling.modes.check()
        if sampling.clock is not None:
            sampling.clock.begin()
        if sampling.units is None:
            losses = self._run_pass(micro_batches, denominators, loss_scale)
            shares: dict[str, Tensor] = {}
        else:
            with sampling.units.watching():
                losses = self._run_pass(micro_batches, denominators, loss_scale)
            shares = sampling.units.shares()
        if sampling.clock is not None:
            sampling.clock.mark("norm and clip")
        return {**losses, **{f"{DETAIL}{name}": share for name, share in shares.items()}}
