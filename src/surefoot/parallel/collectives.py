"""Collectives of an update besides gradients: host numbers and buffers.

Host numbers go through gloo, in one message per window, without a device synchronization.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.core.interruption import CutShort
from surefoot.parallel.mesh import Mesh

MAX_TERMS = 64
"""Largest number of weights (item counts per loss term) in a window."""


class HostSums:
    """Sums the weights of a window over the data-parallel ranks, once a window.

    The same message carries the clock of rank 0 and whether any rank was asked to stop, so that all
    ranks use one clock and stop after the same update. It also announces a rank that leaves before
    it has data: nothing of the window has been computed at that point.

    Args:
        mesh: of the run; ranks that hold the same data contribute once.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._began = time.monotonic()
        self._seconds = 0.0
        self._asked = False
        self._any_asked = False
        self._sums: list[float] = []

    def __call__(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Sums `weights` over the ranks; every rank calls it once per window.

        Raises:
            CutShort: a rank is leaving; this rank leaves, too.
        """
        # Ordered by name: ranks may hold the mapping in different orders.
        terms = sorted(weights)
        own = [float(weights[term]) if self._mesh.leads else 0.0 for term in terms]
        if self._meet(own, leaves=False):
            raise CutShort
        sums = dict(zip(terms, self._sums, strict=False))
        return {term: sums[term] for term in weights}

    def leave(self) -> None:
        """Takes part in the exchange of a window that this rank will not compute."""
        self._meet([], leaves=True)

    def any_of(self, flag: bool) -> bool:
        """Whether any rank passed True; every rank calls it at the same point. No device sync."""
        message = torch.tensor([float(flag)])
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._mesh.host_group)
        return bool(message.item())

    def _meet(self, own: Sequence[float], *, leaves: bool) -> bool:
        clock = time.monotonic() - self._began if self._mesh.rank == 0 else 0.0
        # Fixed length: a rank that leaves does not know how many terms there are.
        padding = [0.0] * (MAX_TERMS - len(own))
        words = [clock, float(self._asked), float(leaves)]
        message = torch.tensor([*own, *padding, *words], dtype=torch.float64)
        dist.all_reduce(message, op=dist.ReduceOp.SUM, group=self._mesh.host_group)
        *self._sums, self._seconds, asked, left = message.tolist()
        self._any_asked = asked > 0
        return bool(left > 0)

    def clock(self) -> float:
        """Clock of rank 0 at the last exchange, in seconds: the same value on all ranks."""
        return self._seconds

    def asked_to_stop(self, asked: bool) -> bool:
        """Sets this rank's answer for the next exchange; returns the combined one of the last."""
        self._asked = asked
        return self._any_asked


class SharedBuffers:
    """Copies the buffers of the first replica to all: running statistics differ between ranks.

    Buffers that are not state (tables derived from the configuration) are left alone.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        kept = model.state_dict().keys()
        groups: dict[torch.dtype, list[Tensor]] = {}
        # Ordered by name, and dtypes by their first buffer. The order of a set depends on memory
        # addresses and would differ between ranks.
        for name, buffer in sorted(model.named_buffers(), key=lambda named: named[0]):
            if name in kept:
                groups.setdefault(buffer.dtype, []).append(buffer)
        self._groups: Sequence[Sequence[Tensor]] = list(groups.values())
        self._mesh = mesh

    def share(self) -> None:
        """Called by every rank after each window."""
        for axis in self._mesh.item_axes() if self._groups else ():
            group = self._mesh.group(axis)
            source = dist.get_global_rank(group, 0)
            for same in self._groups:
                flat = torch.cat([buffer.reshape(-1) for buffer in same])
                dist.broadcast(flat, src=source, group=group)
                parts = flat.split([buffer.numel() for buffer in same])
                with torch.no_grad():
                    for buffer, part in zip(same, parts, strict=True):
                        buffer.copy_(part.view_as(buffer))
