"""Copies batches to a CUDA device ahead of their use, on a stream of its own.

The copy of the next batch runs beside the computation on this one. It holds one batch in advance
and changes no value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.core.errors import RequestError
from surefoot.data.batch import MicroBatch, map_objects, map_tensors, move_object


class DeviceStage:
    """Pins, copies on a side stream and hands over, one batch ahead.

    Args:
        device: a CUDA device.
        pin_memory: copy through page-locked memory; without it the copy waits for the host.
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
                f"pinned memory does not help on {device.type}",
                where="loader.pin_memory",
                rule="page-locked memory speeds up copies to CUDA devices",
                remedy="set loader.pin_memory to auto",
            )
        return None

    def run(self, batches: Generator[MicroBatch, None, None]) -> Generator[MicroBatch, None, None]:
        """The same batches with their data on the device, ready for the current stream."""
        ahead: deque[tuple[MicroBatch, torch.cuda.Event, Any]] = deque()
        failure: Exception | None = None
        with closing(batches):
            while True:
                try:
                    ahead.append(self._send(next(batches)))
                except StopIteration:
                    break
                except Exception as error:
                    # What was loaded before the failure is still used before it is reported.
                    failure = error
                    break
                if len(ahead) > 1:
                    yield self._receive(*ahead.popleft())
            while ahead:
                yield self._receive(*ahead.popleft())
            if failure is not None:
                raise failure

    def _send(self, batch: MicroBatch) -> tuple[MicroBatch, torch.cuda.Event, Any]:
        host = map_tensors(batch.data, _pinned) if self._pin else batch.data
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            moved = map_tensors(
                host, lambda tensor: tensor.to(self._device, non_blocking=self._pin)
            )
            event = self._stream.record_event()
        # The host copy stays referenced until the event has been waited for on the device.
        return replace(batch, data=moved), event, host

    def _receive(self, batch: MicroBatch, event: torch.cuda.Event, host: Any) -> MicroBatch:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)

        def hand_over(tensor: Tensor) -> Tensor:
            # Tells the allocator that the memory is in use on this stream too: it must not be
            # given to the next copy while a kernel still reads it.
            if tensor.is_cuda:
                tensor.record_stream(current)
            return tensor

        map_tensors(batch.data, hand_over)
        del host
        # An object that moves itself hides its tensors: it moves here, on the stream that uses it.
        data = map_objects(batch.data, lambda leaf: move_object(leaf, self._device))
        return replace(batch, data=data)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() or tensor.device.type != "cpu" else tensor.pin_memory()
