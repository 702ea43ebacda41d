"""Prefetches batches to a CUDA device.

A large batch goes through page-locked memory on a side stream, so that its copy overlaps with the
computation on the previous batch. A small one is copied on the stream that uses it: the driver
accepts it immediately, and streams and events would cost more than they save. Prefetches one
batch; changes no values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.core.errors import RequestError
from surefoot.data.batch import MicroBatch, map_leaves, map_tensors, move_object, move_to

# Up to this size the driver copies from pageable memory without waiting for the device.
_SMALL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch on its way to the device."""

    batch: MicroBatch
    event: torch.cuda.Event
    host: Any
    """Source memory, kept until the copy is ordered before its use."""


class DeviceStage:
    """Pins batches, copies them on a side stream and yields them, one batch ahead.

    Args:
        device: a CUDA device.
        pin_memory: copy through page-locked memory; without it the host waits for the copy.
    """

    def __init__(self, device: torch.device, pin_memory: bool) -> None:
        self._device = device
        self._pin = pin_memory
        self._stream = torch.cuda.Stream(device)

    @classmethod
    def choose(
        cls, device: torch.device, pin_memory: Literal["auto", "on", "off"]
    ) -> DeviceStage | None:
        """The stage that fits a device, or None where batches need no stage."""
        if device.type == "cuda":
            return cls(device, pin_memory != "off")
        if pin_memory == "on":
            raise RequestError(
                f"pinned memory has no effect on {device.type}",
                where="loader.pin_memory",
                rule="page-locked memory speeds up copies to CUDA devices",
                remedy="set loader.pin_memory to auto",
            )
        return None

    def run(self, batches: Generator[MicroBatch, None, None]) -> Generator[MicroBatch, None, None]:
        """The same batches with their data on the device, ready for the current stream."""
        ahead: deque[_Sent | MicroBatch] = deque()
        failure: Exception | None = None
        with closing(batches):
            while True:
                try:
                    ahead.append(self._send(next(batches)))
                except StopIteration:
                    break
                except Exception as error:
                    # Batches loaded before a failure are used before it is raised.
                    failure = error
                    break
                if len(ahead) > 1:
                    yield self._receive(ahead.popleft())
            while ahead:
                yield self._receive(ahead.popleft())
            if failure is not None:
                raise failure

    def _send(self, batch: MicroBatch) -> _Sent | MicroBatch:
        if _size(batch.data) <= _SMALL_BYTES:
            return batch
        host = map_tensors(batch.data, _pinned) if self._pin else batch.data
        with torch.cuda.stream(self._stream):
            moved = map_tensors(
                host, lambda tensor: tensor.to(self._device, non_blocking=self._pin)
            )
            event = self._stream.record_event()
        return _Sent(batch.with_data(moved), event, host)

    def _receive(self, sent: _Sent | MicroBatch) -> MicroBatch:
        if isinstance(sent, MicroBatch):
            return sent.with_data(move_to(sent.data, self._device, non_blocking=True))
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.event)

        def hand_over(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                # It hides its tensors, so it is moved here, on the stream that uses it.
                return move_object(leaf, self._device)
            if leaf.is_cuda:
                # Tells the allocator that this stream uses the memory, too: it must not be reused
                # for the next copy while a kernel still reads it.
                leaf.record_stream(current)
            return leaf

        return sent.batch.with_data(map_leaves(sent.batch.data, hand_over))


def _size(data: Any) -> int:
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    map_tensors(data, add)
    return total


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() or tensor.device.type != "cpu" else tensor.pin_memory()
