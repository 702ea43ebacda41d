"""Offloads optimizer state to host memory between steps.

The state is on the device during the step, and on the host during forward and backward, when
activations need the memory (ZeRO-Offload, Ren et al. 2021, with the step on the device). Results
are bit-equal: the same kernel steps the same values. Copies are queued in stream order; the host
waits for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from surefoot.core.errors import RequestError

SMALLEST_ELEMENTS: Final = 2
"""Tensors below this size (step counts) stay where the kernel reads them."""


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
        """Context manager: all state is on the device inside, on the host afterwards."""
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if _moves(value):
                    state[key] = value.to(self._device, non_blocking=True)
        yield
        self.rest()

    def rest(self) -> None:
        """Copies all state to the host; new tensors get host memory once."""
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if _moves(value):
                    place = self._place((parameter, key), value)
                    if place is not value:
                        state[key] = place.copy_(value, non_blocking=True)

    def settle(self) -> None:
        """Waits until the copies to the host are complete: before they are read or written."""
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
    """Refuses layouts that do not support optimizer offload.

    Raises:
        RequestError: the run computes on the CPU, or the state consists of DTensors.
    """
    if device.type == "cpu":
        raise RequestError(
            "memory.offload_optimizer is cpu, and the run computes on the CPU",
            where="memory.offload_optimizer",
            rule="offload moves state from the memory of a device to the host",
            remedy="use memory.offload_optimizer=off on the CPU",
        )
    if is_sharded:
        raise RequestError(
            "memory.offload_optimizer is cpu, and the layers are distributed over ranks",
            where="memory.offload_optimizer",
            rule="the state of DTensors stays on the device of their mesh",
            remedy="use parallel.shard alone, where each rank has a part of the state",
        )
