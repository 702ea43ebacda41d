"""The numbers of one update on their way from the device to the host.

Collecting them never waits for the device; reading them does, one update later. Nothing here
changes a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

from surefoot.engine.window import Window

NUM_HOST_BUFFERS = 2
"""One update is in flight while the next is queued."""


class Parcel(Protocol):
    """Scalars on their way to the host."""

    def has_arrived(self) -> bool:
        """Whether `read` would return at once. Never waits."""
        ...

    def read(self) -> list[float]:
        """Waits for the scalars; Python floats, in the order in which they were sent."""
        ...


@dataclass(frozen=True, slots=True)
class SentNorm:
    """The global gradient norm on its way to the host."""

    parcel: Parcel

    def is_finite(self) -> bool | None:
        """Whether the norm is finite; None while the device has not come to it. Never waits."""
        return isfinite(self.parcel.read()[0]) if self.parcel.has_arrived() else None


@dataclass(frozen=True, slots=True)
class PendingReport:
    """An update that was queued; its scalars may not have been computed yet."""

    window: Window
    denominators: Mapping[str, float]
    rates: Mapping[str, float]
    known: Mapping[str, float]
    """Scalars that the host knew already."""
    sent: Mapping[tuple[str, ...], Parcel]
    """The others, by the names of what each parcel holds."""
    computed_at_once: bool
    """Whether the update was complete when it was queued, as on a CPU."""

    def scalars(self) -> dict[str, float]:
        """Waits for all."""
        scalars = dict(self.known)
        for names, parcel in self.sent.items():
            scalars.update(zip(names, parcel.read(), strict=True))
        return scalars


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

    def has_arrived(self) -> bool:
        return self._scalars[0].device.type == "cpu"

    def read(self) -> list[float]:
        return [float(scalar) for scalar in self._scalars]


class _PinnedParcel:
    """Pinned memory and the event that says when it holds the numbers."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        self._places = [torch.empty((), dtype=dtype, pin_memory=True) for dtype in dtypes]
        self._arrived = torch.cuda.Event()

    def take(self, scalars: Sequence[Tensor]) -> None:
        # Few scalars: a copy of each costs less than to stack them first.
        for place, scalar in zip(self._places, scalars, strict=True):
            place.copy_(scalar, non_blocking=True)
        self._arrived.record()

    def has_arrived(self) -> bool:
        return self._arrived.query()

    def read(self) -> list[float]:
        self._arrived.synchronize()
        return [place.item() for place in self._places]


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
        self._norms = HostMailbox()
        self._others = HostMailbox()

    def send_norm(self, grad_norm: Tensor) -> SentNorm:
        """Starts the copy of the gradient norm, as soon as it is queued."""
        return SentNorm(self._norms.send((grad_norm,)))

    def send(
        self,
        window: Window,
        denominators: Mapping[str, float],
        rates: Mapping[str, float],
        step: int,
        norm: SentNorm,
        scalars: Mapping[str, Tensor | float],
    ) -> PendingReport:
        """Queues the copy of `scalars` (and of the weight norm when it is due after `step`)."""
        tensors = {name: value for name, value in scalars.items() if isinstance(value, Tensor)}
        known = {name: value for name, value in scalars.items() if isinstance(value, float)}
        if (step + 1) % self._weight_norm_every_steps == 0:
            tensors["weight_norm"] = self._measure_weight_norm()
        parcel = self._others.send(tuple(tensors.values()))
        sent = {("grad_norm",): norm.parcel, tuple(tensors): parcel}
        return PendingReport(
            window, denominators, rates, known, sent, parcel.has_arrived()
        )

    @staticmethod
    def skipped(window: Window, denominators: Mapping[str, float]) -> PendingReport:
        """The report of a window that carries no weight: there was nothing to compute."""
        nothing = {"loss": 0.0, "grad_norm": 0.0, "loss_scale": 1.0}
        return PendingReport(window, denominators, {}, nothing, {}, True)
