"""What ranks tell each other in an update: host numbers, buffers. Gradients travel elsewhere.

Host numbers go through gloo in one message a window and wait for no device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.core.interruption import CutShort
from surefoot.parallel.mesh import Mesh

MOST_TERMS = 64
"""Weights of a window."""


class HostSums:
    """Sums the weights of a window over the data-parallel ranks, once a window.

    The clock of rank 0 and the question whether any rank was asked to stop travel along, so that
    all ranks have one clock and stop after the same update. So does the word of a rank that leaves
    before it has data: nothing of a window has been computed when the ranks meet here.

    Args:
        mesh: ranks that have the same data speak once.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._began = time.monotonic()
        self._seconds = 0.0
        self._asked = False
        self._any_asked = False
        self._sums: list[float] = []

    def __call__(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The sums of `weights`; every rank calls it once for each window.

        Raises:
            CutShort: a rank has left; so does this one.
        """
        # By name: a mapping may be in another order on another rank.
        terms = sorted(weights)
        own = [float(weights[term]) if self._mesh.leads else 0.0 for term in terms]
        if self._meet(own, leaves=False):
            raise CutShort
        sums = dict(zip(terms, self._sums, strict=False))
        return {term: sums[term] for term in weights}

    def leave(self) -> None:
        """Comes to the meeting of a window that this rank will not have."""
        self._meet([], leaves=True)

    def any_of(self, flag: bool) -> bool:
        """Whether any rank says yes; every rank calls it at the same point. Waits for no device."""
        message = torch.tensor([float(flag)])
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._mesh.host_group)
        return bool(message.item())

    def _meet(self, own: Sequence[float], *, leaves: bool) -> bool:
        clock = time.monotonic() - self._began if self._mesh.rank == 0 else 0.0
        # Of one length on all ranks: one that leaves does not know how many terms there are.
        padding = [0.0] * (MOST_TERMS - len(own))
        words = [clock, float(self._asked), float(leaves)]
        message = torch.tensor([*own, *padding, *words], dtype=torch.float64)
        dist.all_reduce(message, op=dist.ReduceOp.SUM, group=self._mesh.host_group)
        *self._sums, self._seconds, asked, left = message.tolist()
        self._any_asked = asked > 0
        return bool(left > 0)

    def clock(self) -> float:
        """Seconds on the clock of rank 0 when the ranks last met: the same on all."""
        return self._seconds

    def asked_to_stop(self, asked: bool) -> bool:
        """Leaves this rank's answer for the next meeting; returns that of all at the last one."""
        self._asked = asked
        return self._any_asked


class SharedBuffers:
    """Gives all replicas the buffers of the first: running statistics see each rank's own data.

    Buffers that are no state (tables that follow from the configuration) are left alone.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        kept = model.state_dict().keys()
        groups: dict[torch.dtype, list[Tensor]] = {}
        # By name, and number types by their first buffer: never the order of a set, which is that
        # of memory addresses and so another on every rank.
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
