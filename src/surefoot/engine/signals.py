"""The numbers of one update on their way from the device to the host.

Collecting them never waits for the device; reading them does, one update later. Nothing here
changes a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.engine.window import Window

NUM_HOST_BUFFERS = 2
"""One update is in flight while the next is queued."""


@dataclass(frozen=True, slots=True)
class PendingReport:
    """An update that was queued; its scalars may not have been computed yet."""

    window: Window
    denominators: Mapping[str, float]
    names: tuple[str, ...]
    read: Callable[[], list[float]]
    """Waits for the scalars and returns them, in the order of `names`."""
    known: Mapping[str, float]
    """Scalars that the host knew already."""
    rates: Mapping[str, float]
    computed_at_once: bool = False
    """Whether the update was complete when it was queued, as on a CPU."""

    def scalars(self) -> dict[str, float]:
        return {**self.known, **dict(zip(self.names, self.read(), strict=True))}


class HostMailbox:
    """Sends 0-dim device tensors to the host without a wait.

    On CUDA each is copied into pinned memory behind the queued work, with an event to wait for;
    elsewhere the tensors themselves are kept and read when asked for.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, tuple[torch.dtype, ...]], _Slot] = {}
        self._sent = 0

    def send(self, scalars: tuple[Tensor, ...]) -> Callable[[], list[float]]:
        """Starts the copy; call what it returns to wait for the numbers (Python floats)."""
        if not scalars[0].is_cuda:
            return lambda: [float(scalar) for scalar in scalars]
        self._sent += 1
        dtypes = tuple(scalar.dtype for scalar in scalars)
        key = self._sent % NUM_HOST_BUFFERS, dtypes
        slot = self._slots.get(key) or self._slots.setdefault(key, _Slot(dtypes))
        # Few scalars: a copy of each costs less than to stack them first.
        for place, scalar in zip(slot.places, scalars, strict=True):
            place.copy_(scalar, non_blocking=True)
        slot.arrived.record()
        return slot.read


class _Slot:
    """Pinned memory for the scalars of one update."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        self.places = [torch.empty((), dtype=dtype, pin_memory=True) for dtype in dtypes]
        self.arrived = torch.cuda.Event()

    def read(self) -> list[float]:
        self.arrived.synchronize()
        return [place.item() for place in self.places]


class Signals:
    """Chooses which scalars of an update are sent to the host.

    Args:
        measure_weight_norm: global weight norm as a 0-dim device tensor.
        weight_norm_every_steps: it is sent on the updates that complete a multiple of this.
    """

    def __init__(
        self, measure_weight_norm: Callable[[], Tensor], weight_norm_every_steps: int
    ) -> None:
        self._measure_weight_norm = measure_weight_norm
        self._weight_norm_every_steps = weight_norm_every_steps
        self._mailbox = HostMailbox()

    def send(
        self,
        window: Window,
        denominators: Mapping[str, float],
        rates: Mapping[str, float],
        step: int,
        scalars: Mapping[str, Tensor | float],
    ) -> PendingReport:
        """Queues the copy of `scalars` (and of the weight norm when it is due after `step`)."""
        sent = {name: value for name, value in scalars.items() if isinstance(value, Tensor)}
        known = {name: value for name, value in scalars.items() if isinstance(value, float)}
        if (step + 1) % self._weight_norm_every_steps == 0:
            sent["weight_norm"] = self._measure_weight_norm()
        tensors = tuple(sent.values())
        return PendingReport(
            window,
            denominators,
            tuple(sent),
            self._mailbox.send(tensors),
            known,
            rates,
            computed_at_once=tensors[0].device.type == "cpu",
        )

    @staticmethod
    def skipped(window: Window, denominators: Mapping[str, float]) -> PendingReport:
        """The report of a window that carries no weight: there was nothing to compute."""
        nothing = {"loss": 0.0, "grad_norm": 0.0, "loss_scale": 1.0}
        return PendingReport(window, denominators, (), list, nothing, {}, True)
