"""The update in flight: its numbers travel to the host while the next is queued, then they count.

Sending never waits for the device; settling does, one update later. This is where `step` lives on
the host: a skipped update does not advance it, so schedule and cadence are plain integers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surefoot.engine.window import Window
from surefoot.state.run_state import Progress
from surefoot.tasks.task import main_weight

NUM_HOST_BUFFERS = 2
"""One update is in flight while the next is queued."""
DETAIL = "detail."
"""Opens the names of sampled numbers on their way to the host."""


class Sent(ABC):
    """The numbers of an update, on their way to the host."""

    limit: float
    """An update with a gradient norm at or above it, or NaN, is not applied."""
    at_once: bool
    """Whether they were computed as soon as they were queued, as on a CPU."""
    is_sampled: bool = False
    """Whether those of a sampled window are among them."""

    @abstractmethod
    def has_arrived(self) -> bool:
        """Whether `read` would return at once. Never waits."""

    @abstractmethod
    def read(self) -> dict[str, float]:
        """Waits for all of them; Python floats."""

    def is_below_limit(self) -> bool | None:
        """Whether the update is applied; None while the device has not come to it."""
        return self.read()["grad_norm"] < self.limit if self.has_arrived() else None


class PendingReport(NamedTuple):
    """An update that was queued; its numbers may not have been computed yet."""

    window: Window
    denominators: Mapping[str, float]
    rates: Mapping[str, float]
    sent: Sent


class Signals(Protocol):
    """Sends the numbers of an update, and maybe further ones, to the host."""

    def send(self, numbers: Mapping[str, Tensor | float], limit: float) -> Sent:
        """Starts the copy of the numbers of an update, once they are queued.

        Args:
            limit: of its gradient norm; at or above it the update is not applied.
        """
        ...

    def after_step(self, sent: Sent, step: int) -> Sent:
        """What was sent with what is known once the weights have moved, `step` times before."""
        ...


class PlainSignals:
    """Sends without a wait; two updates may be on their way.

    On CUDA numbers are copied into pinned memory behind the queued work, with an event to wait for;
    elsewhere the tensors themselves are kept, and read when asked for.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, tuple[torch.dtype, ...]], _PinnedBuffer] = {}
        self._num_sent = 0

    def send(self, numbers: Mapping[str, Tensor | float], limit: float = inf) -> Sent:
        """Takes at least one tensor."""
        first = next(number for number in numbers.values() if isinstance(number, Tensor))
        if first.is_cuda:
            return self._copied(numbers, limit)
        return Kept(numbers, limit, first.device.type == "cpu")

    def after_step(self, sent: Sent, step: int) -> Sent:
        return sent

    def _copied(self, numbers: Mapping[str, Tensor | float], limit: float) -> Sent:
        tensors = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
        known = {name: value for name, value in numbers.items() if isinstance(value, float)}
        self._num_sent += 1
        dtypes = tuple(tensor.dtype for tensor in tensors.values())
        key = self._num_sent % NUM_HOST_BUFFERS, dtypes
        if key not in self._buffers:
            self._buffers[key] = _PinnedBuffer(dtypes)
        self._buffers[key].take(list(tensors.values()))
        return _Copied(tuple(tensors), self._buffers[key], known, limit)


@dataclass(eq=False)
class Kept(Sent):
    """The numbers themselves."""

    numbers: Mapping[str, Tensor | float]
    limit: float = inf
    at_once: bool = True

    def has_arrived(self) -> bool:
        return self.at_once

    def read(self) -> dict[str, float]:
        return {name: float(number) for name, number in self.numbers.items()}


@dataclass(eq=False)
class _Copied(Sent):
    """Copies in a buffer, and the numbers that the host knew already."""

    names: tuple[str, ...]
    buffer: _PinnedBuffer
    known: Mapping[str, float]
    limit: float
    at_once: bool = False

    def has_arrived(self) -> bool:
        return self.buffer.has_arrived()

    def read(self) -> dict[str, float]:
        return {**self.known, **dict(zip(self.names, self.buffer.read(), strict=True))}


NOTHING = Kept({"loss": 0.0, "grad_norm": 0.0, "loss_scale": 1.0}, limit=0.0)
"""Of a window that carries no weight: there was nothing to compute, and nothing is applied."""


class _PinnedBuffer:
    """Pinned memory and the event that says when it holds the numbers."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        self._places = [torch.empty((), dtype=dtype, pin_memory=True) for dtype in dtypes]
        self._arrived = torch.Event(device="cuda")
        self._numbers: list[float] | None = None

    def take(self, scalars: Sequence[Tensor]) -> None:
        self._numbers = None
        # Few scalars: a copy of each costs less than to stack them first.
        torch._foreach_copy_(self._places, list(scalars), non_blocking=True)
        self._arrived.record()

    def has_arrived(self) -> bool:
        return bool(self._arrived.query())

    def read(self) -> list[float]:
        if self._numbers is None:
            self._arrived.synchronize()
            self._numbers = [place.item() for place in self._places]
        return self._numbers


def no_limit() -> float:
    """What a guard lets through that skips no spike."""
    return inf


class UpdatesInFlight(ABC):
    """Holds the one update in flight; settles it in order.

    Args:
        progress: the counts of the run; advanced here and nowhere else.
        counts_tokens: whether a weight is a number of tokens.
    """

    def __init__(self, progress: Progress, counts_tokens: bool) -> None:
        self.progress = progress
        self.norm_limit: Callable[[], float] = no_limit
        """What the guard lets through of the next update: a gradient norm below this."""
        self._counts_tokens = counts_tokens
        self._in_flight: PendingReport | None = None
        self._handed_over = time.perf_counter()

    def hand_over(self, pending: PendingReport) -> None:
        """Takes the report of the update just queued; an older one is settled first."""
        self.settle()
        self._in_flight = pending
        self._handed_over = time.perf_counter()

    def settle(self) -> int:
        """Waits for the update in flight, if any; returns the count of updates completed.

        Raises:
            NonFiniteError: the guard says stop.
            RolledBack: the guard says go back.
        """
        progress, pending, self._in_flight = self.progress, self._in_flight, None
        if pending is not None:
            asked = time.perf_counter()
            scalars, window = pending.sent.read(), pending.window
            applied = scalars["grad_norm"] < pending.sent.limit
            progress.step += applied
            progress.window += 1
            progress.samples += window.samples
            progress.tokens += self._tokens_of(pending)
            progress.cursor = window.cursor_after
            self._publish(pending, scalars, applied, asked)
        return progress.step

    def tokens_in_flight(self) -> int:
        """Loss-bearing tokens of the update in flight, over all data-parallel ranks."""
        return 0 if self._in_flight is None else self._tokens_of(self._in_flight)

    def next_window(self) -> int:
        """Number of the window that is passed next, as `StepReport.window` counts."""
        return self.progress.window + 1 + (self._in_flight is not None)

    def _tokens_of(self, pending: PendingReport) -> int:
        return round(main_weight(pending.denominators)) if self._counts_tokens else 0

    @abstractmethod
    def _publish(
        self, pending: PendingReport, scalars: dict[str, float], applied: bool, asked: float
    ) -> None:
        """Tells of an update that was counted.

        Args:
            asked: when its scalars were asked for, by `time.perf_counter`.
        """
