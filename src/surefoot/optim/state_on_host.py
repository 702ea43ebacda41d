"""Optimizer state that rests in the memory of the host between two steps.

It is on the device while the optimizer steps, and nowhere near it during forward and backward, when
activations need the room (ZeRO-Offload, Ren et al. 2021, with the step left on the device). The
numbers are the same bits: the same kernel steps the same values. The host waits for no copy: all
are queued in the device's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from surefoot.core.errors import RequestError

SMALLEST_ELEMENTS: Final = 2
"""A step count stays where the kernel reads it."""


class StateOnHost:
    """The moments of an optimizer, in pinned memory between its steps.

    Args:
        optimizer: steps parameters of one device.
        device: of its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._pinned = device.type == "cuda"
        self._resting: dict[tuple[Tensor, str], Tensor] = {}

    @contextmanager
    def brought(self) -> Iterator[None]:
        """All state is on the device inside, on the host afterwards."""
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if _moves(value):
                    state[key] = value.to(self._device, non_blocking=True)
        yield
        self.rest()

    def rest(self) -> None:
        """Takes all state to the host; what is new gets memory there, once."""
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if _moves(value):
                    place = self._place((parameter, key), value)
                    if place is not value:
                        state[key] = place.copy_(value, non_blocking=True)

    def settle(self) -> None:
        """Waits until what rests on the host has arrived: before it is read, or written to."""
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()

    def _place(self, owner: tuple[Tensor, str], value: Tensor) -> Tensor:
        if owner not in self._resting:
            self._resting[owner] = torch.empty_like(
                value, device="cpu", pin_memory=self._pinned, memory_format=torch.preserve_format
            )
        return self._resting[owner]


def _moves(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() >= SMALLEST_ELEMENTS


def check_state_on_host(device: torch.device, is_sharded: bool) -> None:
    """Refuses a layout whose state cannot rest on the host.

    Raises:
        RequestError: the run computes on the host, or each rank holds a part of the state.
    """
    if device.type == "cpu":
        raise RequestError(
            "memory.offload_optimizer is cpu, and the run computes on the CPU",
            where="memory.offload_optimizer",
            rule="what goes to the host comes from the memory of a device",
            remedy="use memory.offload_optimizer=off on the CPU",
        )
    if is_sharded:
        raise RequestError(
            "memory.offload_optimizer is cpu, and the layers are spread over ranks",
            where="memory.offload_optimizer",
            rule="the state of distributed parameters stays on the device of their mesh",
            remedy="use parallel.shard alone, which leaves each rank its part of the state",
        )
