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
    rates: Mapping[str, float]
    computed_at_once: bool = False
    """Whether the update was complete when it was queued, as on a CPU."""

    def scalars(self) -> dict[str, float]:
        return dict(zip(self.names, self.read(), strict=True))


class HostMailbox:
    """Sends 0-dim device tensors to the host without a wait.

    On CUDA they are stacked and copied into pinned memory behind the queued work, with an event to
    wait for; elsewhere the tensors themselves are kept and read when asked for.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int, torch.dtype], tuple[Tensor, torch.cuda.Event]] = {}
        self._sent = 0

    def send(self, scalars: tuple[Tensor, ...]) -> Callable[[], list[float]]:
        """Starts the copy; call what it returns to wait for the numbers (Python floats)."""
        if not scalars[0].is_cuda:
            return lambda: [float(scalar) for scalar in scalars]
        self._sent += 1
        stacked = torch.stack(scalars)
        slot = (self._sent % NUM_HOST_BUFFERS, len(scalars), stacked.dtype)
        if slot not in self._slots:
            pinned = torch.empty(len(scalars), dtype=stacked.dtype, pin_memory=True)
            self._slots[slot] = (pinned, torch.cuda.Event())
        buffer, arrived = self._slots[slot]
        buffer.copy_(stacked, non_blocking=True)
        arrived.record()

        def read() -> list[float]:
            arrived.synchronize()
            numbers: list[float] = buffer.tolist()
            return numbers

        return read


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
        scalars: Mapping[str, Tensor],
    ) -> PendingReport:
        """Queues the copy of `scalars` (and of the weight norm when it is due after `step`)."""
        due = (step + 1) % self._weight_norm_every_steps == 0
        sent = {**scalars, "weight_norm": self._measure_weight_norm()} if due else scalars
        numbers = tuple(sent.values())
        return PendingReport(
            window,
            denominators,
            tuple(sent),
            self._mailbox.send(numbers),
            rates,
            computed_at_once=numbers[0].device.type == "cpu",
        )

    @staticmethod
    def skipped(window: Window, denominators: Mapping[str, float]) -> PendingReport:
        """The report of a window that carries no weight: there was nothing to compute."""
        nothing = {"loss": 0.0, "grad_norm": 0.0, "loss_scale": 1.0}
        return PendingReport(
            window, denominators, tuple(nothing), lambda: list(nothing.values()), {}, True
        )
