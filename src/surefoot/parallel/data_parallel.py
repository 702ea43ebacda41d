"""Replicas of a model: torch's DistributedDataParallel with gradients summed, never averaged.

The engine has divided by the global denominator already, so a mean would divide twice.
"""

# No `from __future__ import annotations`: torch reads the types of a communication hook.

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.errors import ModelError
from surefoot.parallel.mesh import Mesh

MAX_NAMED: Final = 5
"""Number of parameters that an error names."""
# Newer versions of torch deprecate the older name. Buffers are shared once per window by
# `SharedBuffers`, and tables derived from the configuration never.
_NEWER: Final = "forward_sync_buffers"
_KNOWN: Final = signature(DistributedDataParallel).parameters
_OWN_BUFFERS: Final[dict[str, Any]] = {_NEWER if _NEWER in _KNOWN else "broadcast_buffers": False}


class Replicas:
    """Reduces gradients once per window, during its last backward."""

    def __init__(
        self, wrapped: DistributedDataParallel, summing: "Summing", by_blocks: bool
    ) -> None:
        self.wrapped = wrapped
        self._summing = summing
        self._compiling = blocks_left_whole() if by_blocks else nullcontext()
        self._trained = {n: p for n, p in wrapped.module.named_parameters() if p.requires_grad}
        self._num_elements = sum(parameter.numel() for parameter in self._trained.values())

    @classmethod
    def of(
        cls,
        model: nn.Module,
        mesh: Mesh,
        device: torch.device,
        *,
        find_unused: bool,
        by_blocks: bool,
    ) -> "Replicas":
        """Wraps a model that is on its device; the wrapped module keeps its names and state.

        Args:
            model: the model.
            mesh: the ranks.
            device: where the model is.
            find_unused: whether each backward searches for unused parameters.
            by_blocks: whether the model's blocks are compiled separately.
        """
        group = mesh.group("replicate")
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused,
            **_OWN_BUFFERS,
        )
        summing = Summing(group)
        wrapped.register_comm_hook(summing, sum_gradients)
        if not find_unused:
            settle_buckets(wrapped)
        return cls(wrapped, summing, by_blocks)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        self._summing.num_elements = 0
        with self._compiling, nullcontext() if is_last else self.wrapped.no_sync():
            yield

    def finish(self) -> None:
        """The last backward has left the sums in `.grad`: of all parameters, or of none.

        Raises:
            ModelError: a parameter was unused in the last forward; its bucket was never summed.
        """
        if self._summing.num_elements == self._num_elements:
            return
        idle = [name for name, p in self._trained.items() if p.grad is None]
        raise ModelError(
            "a parameter was not used by the loss: the gradients of the replicas were not summed",
            where=", ".join(idle[:MAX_NAMED]) or "a parameter that earlier micro-batches used",
            rule="replicas sum the gradients of all parameters in the last backward of a window",
            remedy="freeze what is not used (model.frozen), or set "
            "parallel.unused_parameters=find, which searches for them in each backward",
        )


def blocks_left_whole() -> AbstractContextManager[object]:
    """Compiles a block in one piece; reentrant.

    Under DDP, torch splits a compiled graph to overlap the reduction of one piece with the
    backward of the next. Blocks are small enough already, and a split would prevent fusion across
    it.
    """
    # Imported only if something is compiled.
    from torch._dynamo import config

    whole: AbstractContextManager[object] = config.patch(optimize_ddp=False)
    return whole


def settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Builds the gradient buckets of DDP now, once and for all; every rank calls it.

    Torch builds them after the first backward of each process, in the order in which gradients
    arrived. With three or more ranks, rounding depends on an element's place in its bucket: the
    first update after a resume would differ from that of an uninterrupted run.
    """
    parameters = [p for p in wrapped.module.parameters() if p.requires_grad]
    wrapped.reducer.prepare_for_forward()
    wrapped.reducer.prepare_for_backward([])
    # In reverse order: the last parameter's gradient is ready first.
    torch.autograd.backward([(parameter * 0).sum() for parameter in parameters])
    wrapped.reducer._rebuild_buckets()
    wrapped.zero_grad(set_to_none=True)


@dataclass
class Summing:
    """State of the communication hook."""

    group: Any
    num_elements: int = 0
    """Number of elements reduced in this backward."""


def sum_gradients(summing: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook: sums over the replicas, overlapped with the backward."""
    buffer = bucket.buffer()
    summing.num_elements += buffer.numel()
    work = dist.all_reduce(buffer, op=dist.ReduceOp.SUM, group=summing.group, async_op=True)
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: done.value()[0]
    )
    return summed
