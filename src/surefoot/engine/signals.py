"""The numbers of one update on their way from the device to the host.

Collecting them never waits for the device; reading them does, one update later. Nothing here
changes a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surefoot.engine.measure.sampling import Sampling
from surefoot.engine.window import Window

NUM_HOST_BUFFERS = 2
"""One update is in flight while the next is queued."""


class Parcel(Protocol):
    """Scalars on their way to the host."""

    at_once: bool
    """Whether they were computed as soon as they were queued, as on a CPU."""

    def has_arrived(self) -> bool:
        """Whether `read` would return at once. Never waits."""
        ...

    def read(self) -> list[float]:
        """Waits for the scalars; Python floats, in the order in which they were sent."""
        ...


class Sent(NamedTuple):
    """The numbers of an update, on their way to the host."""

    names: tuple[str, ...]
    parcel: Parcel
    known: Mapping[str, float]
    """Scalars that the host knew already."""
    limit: float
    """An update with a gradient norm at or above it, or NaN, is not applied."""

    def is_below_limit(self) -> bool | None:
        """Whether the update is applied; None while the device has not come to it."""
        if not self.parcel.has_arrived():
            return None
        return self.parcel.read()[self.names.index("grad_norm")] < self.limit

    def read(self) -> dict[str, float]:
        """Waits for all."""
        return {**self.known, **dict(zip(self.names, self.parcel.read(), strict=True))}


class PendingReport(NamedTuple):
    """An update that was queued; its scalars may not have been computed yet."""

    window: Window
    denominators: Mapping[str, float]
    rates: Mapping[str, float]
    scalars: Callable[[], dict[str, float]]
    """Waits for them."""
    computed_at_once: bool
    """Whether the update was complete when it was queued, as on a CPU."""
    limit: float = inf
    """An update with a gradient norm at or above it, or NaN, was not applied."""
    is_sampled: bool = False
    """Whether its scalars hold those of a sampled window."""


class HostMailbox:
    """Sends 0-dim device tensors to the host without a wait, two parcels in flight at most.

    On CUDA each is copied into pinned memory behind the queued work, with an event to wait for;
    elsewhere the tensors themselves are kept and read when asked for.
    """

    def __init__(self) -> None:
        self._parcels: dict[tuple[int, tuple[torch.dtype, ...]], _PinnedParcel] = {}
        self._sent = 0

    def send(self, scalars: Sequence[Tensor]) -> Parcel:
        """Starts the copy of at least one scalar."""
        if not scalars[0].is_cuda:
            return _KeptParcel(scalars)
        self._sent += 1
        dtypes = tuple(scalar.dtype for scalar in scalars)
        key = self._sent % NUM_HOST_BUFFERS, dtypes
        if key not in self._parcels:
            self._parcels[key] = _PinnedParcel(dtypes)
        self._parcels[key].take(scalars)
        return self._parcels[key]


class _KeptParcel:
    """The tensors themselves."""

    def __init__(self, scalars: Sequence[Tensor]) -> None:
        self._scalars = scalars
        self.at_once = scalars[0].device.type == "cpu"

    def has_arrived(self) -> bool:
        return self.at_once

    def read(self) -> list[float]:
        return [float(scalar) for scalar in self._scalars]


class _PinnedParcel:
    """Pinned memory and the event that says when it holds the numbers."""

    at_once = False

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


class Signals:
    """Chooses which scalars of an update are sent to the host.

    Args:
        measure_weight_norm: global weight norm as a 0-dim device tensor.
        weight_norm_every_steps: it is sent on the updates that complete a multiple of this.
        sampling: further numbers of sampled windows; None for none.
    """

    def __init__(
        self,
        measure_weight_norm: Callable[[], Tensor],
        weight_norm_every_steps: int,
        sampling: Sampling | None = None,
    ) -> None:
        self._sampling = sampling
        self._measure_weight_norm = measure_weight_norm
        self._weight_norm_every_steps = weight_norm_every_steps
        self._mailbox = HostMailbox()
        self._late_mailbox = HostMailbox()

    def send(self, scalars: Mapping[str, Tensor | float], limit: float) -> Sent:
        """Starts the copy of the numbers of an update, once they are queued.

        Args:
            limit: of its gradient norm; at or above it the update is not applied.
        """
        if self._sampling is not None and self._sampling.is_on:
            scalars = {**scalars, **self._sampling.before_step()}
        tensors = {name: value for name, value in scalars.items() if isinstance(value, Tensor)}
        known = {name: value for name, value in scalars.items() if isinstance(value, float)}
        return Sent(tuple(tensors), self._mailbox.send(tuple(tensors.values())), known, limit)

    def report(
        self,
        window: Window,
        denominators: Mapping[str, float],
        rates: Mapping[str, float],
        step: int,
        sent: Sent,
    ) -> PendingReport:
        """What will be told of the update, with the weight norm when it is due after `step`."""
        read: Callable[[], dict[str, float]] = sent.read
        late: dict[str, Tensor] = {}
        is_sampled = self._sampling is not None and self._sampling.is_on
        if is_sampled:
            assert self._sampling is not None
            late = self._sampling.after_step()
        if (step + 1) % self._weight_norm_every_steps == 0:
            late["weight_norm"] = self._measure_weight_norm()
        if late:
            parcel = self._late_mailbox.send(tuple(late.values()))

            def read() -> dict[str, float]:
                return {**sent.read(), **dict(zip(late, parcel.read(), strict=True))}

        at_once = sent.parcel.at_once
        return PendingReport(window, denominators, rates, read, at_once, sent.limit, is_sampled)

    def restart(self) -> None:
        """The run was put back to an older state."""
        if self._sampling is not None:
            self._sampling.restart()

    def skipped(self, window: Window, denominators: Mapping[str, float]) -> PendingReport:
        """The report of a window that carries no weight: there was nothing to compute."""
        self.restart()
        nothing = {"loss": 0.0, "grad_norm": 0.0, "loss_scale": 1.0}
        return PendingReport(window, denominators, {}, lambda: nothing, True)
