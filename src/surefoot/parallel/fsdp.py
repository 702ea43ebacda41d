"""Shards of a model by torch's FSDP2, with gradients summed, never averaged.

What `parallel.shards` shards, and when each part is gathered:

| shards     | between updates        | within a window                                            |
|------------|------------------------|------------------------------------------------------------|
| optimizer  | everything is sharded  | parameters and gradients are full: one reduction (ZeRO-1)  |
| gradients  | everything is sharded  | parameters are full, gradients sharded at once (ZeRO-2)    |
| parameters | everything is sharded  | parameters are full while a block runs (ZeRO-3)            |

Parameters outside the blocks (embeddings, head) stay gathered from forward to backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from surefoot.config.sections.parallel import ParallelSection
from surefoot.core.errors import RequestError
from surefoot.memory.blocks import repeated_blocks
from surefoot.parallel.expert import copies_and_shards, shard_experts
from surefoot.parallel.mesh import Mesh


class Shards:
    """A sharded model: when its parameters are gathered and its gradients reduce-scattered."""

    def __init__(self, model: Any, section: ParallelSection) -> None:
        self._model = model
        self._keeps_whole = section.shards != "parameters"
        self._reduces_each = reduces_each_micro_batch(section)
        self._was_last: bool | None = None

    @classmethod
    def of(
        cls, model: nn.Module, section: ParallelSection, mesh: Mesh, compute_dtype: torch.dtype
    ) -> Shards:
        """Shards a model in place; its parameters become DTensors under the same names."""
        reduces_each_micro_batch(section)
        options: dict[str, Any] = {
            "mesh": _mesh_of_weights(mesh),
            "reshard_after_forward": section.shards == "parameters",
            "mp_policy": precision_policy(section, compute_dtype),
        }
        if mesh.sizes.expert > 1:
            shard_experts(model, mesh, options)
        blocks = repeated_blocks(model)
        for block in blocks:
            fully_shard(block, **options)
        # The backward starts with the root's last parameters: it does not reshard after forward.
        fully_shard(model, **{**options, "reshard_after_forward": False})
        gather_ahead([model, *blocks])
        for module in sharded_modules(model):
            # gloo has no pre-multiplied sum, and the engine has already divided.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return cls(model, section)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        if is_last != self._was_last:
            model = self._model
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last or self._reduces_each)
            # Replicas are summed once per window, however often shards are.
            model.set_requires_all_reduce(is_last)
            model.set_reshard_after_backward(is_last or not self._keeps_whole)
            self._was_last = is_last
        return nullcontext()

    def finish(self) -> None:
        """The last backward has left the summed shards in `.grad`."""

    def reshard(self) -> None:
        """Reshards all gathered parameters, such as after an evaluation."""
        for module in sharded_modules(self._model):
            module.reshard()


def gather_ahead(modules: Sequence[Any]) -> None:
    """Prefetches each module's parameters during the forward of the module before.

    By default a module gathers when its own forward begins, which is too late where the host is
    barely ahead of the device. In the backward FSDP2 prefetches by itself.
    """
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])


def _mesh_of_weights(mesh: Mesh) -> DeviceMesh:
    """A mesh of replicas and shards (HSDP), or of shards alone."""
    if mesh.sizes.expert > 1:
        return copies_and_shards(mesh)
    if mesh.weight_sizes.replicate > 1:
        return mesh.submesh("replicate", "shard")
    return mesh.submesh("shard")


def reduces_each_micro_batch(section: ParallelSection) -> bool:
    """Whether gradients are reduced after each micro-batch.

    Raises:
        RequestError: `reduce` and `shards` contradict each other.
    """
    if section.reduce == "as-shards":
        return section.shards != "optimizer"
    each = section.reduce == "micro-batch"
    if section.shards == "gradients" and not each:
        raise RequestError(
            "parallel.reduce is window, and parallel.shards is gradients",
            where="parallel.reduce",
            rule="gradients are sharded only if each micro-batch is reduced",
            remedy="use parallel.shards=optimizer (ZeRO-1), or leave parallel.reduce out",
        )
    return each


def precision_policy(section: ParallelSection, compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """The dtypes of communication: as parameters are stored, or as they are computed with."""
    if section.gather == "as-stored" or compute_dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules that gather their own parameters."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
