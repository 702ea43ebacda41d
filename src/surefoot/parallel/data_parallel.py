"""Replicas of a model: torch's DistributedDataParallel with gradients summed, never averaged.

The engine has divided by the global denominator already, so a mean would divide twice.
"""

# No `from __future__ import annotations`: torch reads the types of a communication hook.

from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.parallel.mesh import Mesh

# Newer versions of torch warn of the older name. Our buffers are shared once a window, and tables
# that follow from the configuration never.
_NEWER: Final = "forward_sync_buffers"
_KNOWN: Final = signature(DistributedDataParallel).parameters
_OWN_BUFFERS: Final[dict[str, Any]] = {_NEWER if _NEWER in _KNOWN else "broadcast_buffers": False}


class Replicas:
    """Gradients are reduced during the last backward of a window, once."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.wrapped = wrapped

    @classmethod
    def of(cls, model: nn.Module, mesh: Mesh, device: torch.device) -> "Replicas":
        """Wraps a model that is on its device; the bare module keeps its names and its state."""
        group = mesh.group("replicate")
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
            **_OWN_BUFFERS,
        )
        wrapped.register_comm_hook(group, sum_gradients)
        return cls(wrapped)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else self.wrapped.no_sync()

    def finish(self) -> None:
        """The last backward has left the sums in `.grad`."""


def sum_gradients(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook: the sum over the replicas, while the backward goes on."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
