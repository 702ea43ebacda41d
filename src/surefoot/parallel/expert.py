"""Expert parallelism: spreads the experts of a model along the expert axis, replicates the rest.

Ranks along the axis have data of their own. In each routed layer the ranks exchange tokens: each
sends its tokens to the ranks that hold their experts and receives the results, with torch's
differentiable all-to-all (GShard, Lepikhin et al. 2020). An expert thus sees the tokens of all
ranks along the axis, and its gradient is summed only over ranks that hold the same expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from surefoot.core.errors import RequestError
from surefoot.models.moe import Experts, routed_layers
from surefoot.parallel.mesh import Mesh, MeshSizes


class TokenExchange:
    """Sends tokens to the ranks of their experts, and the results back.

    The number of tokens per rank is known only after routing, so each forward has one device sync.

    Args:
        group: the ranks of the expert axis; each holds the same number of experts, in order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = group.size()

    # Split sizes must be known on the host; what the experts compute is compiled separately.
    @torch._disable_dynamo(recursive=False)
    def __call__(self, rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
        """Passes rows [N, D], sorted by expert, with counts [E], through all ranks' experts."""
        leaving = counts.reshape(self._size, -1)
        # Rows sent to each rank, for each of that rank's experts.
        arriving = all_to_all_single(leaving.contiguous(), None, None, self._group)
        sizes = torch.stack([leaving.sum(dim=1), arriving.sum(dim=1)])
        sent, received = sizes.tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, self._group)
        owners = torch.arange(arriving.shape[1], device=counts.device).repeat(self._size)
        by_expert = owners.repeat_interleave(arriving.reshape(-1), output_size=sum(received))
        order = by_expert.argsort(stable=True)
        computed = experts(arrived.index_select(0, order), arriving.sum(dim=0))
        returned = computed.index_select(0, order.argsort())
        return all_to_all_single_autograd(returned, sent, received, self._group)


def spread_experts(model: nn.Module, mesh: Mesh) -> None:
    """Leaves each rank with its own experts, in place; names stay; parameters become DTensors."""
    along = mesh.submesh("expert")
    exchange = TokenExchange(mesh.group("expert"))
    for layer in routed_layers(model).values():
        layer.exchange = exchange
        for name, weight in list(layer.experts.named_parameters()):
            # All ranks have drawn the same weights: no communication is needed.
            spread = distribute_tensor(weight.detach(), along, [Shard(0)], src_data_rank=None)
            parameter = nn.Parameter(spread, requires_grad=weight.requires_grad)
            setattr(layer.experts, name, parameter)


def shard_experts(model: nn.Module, mesh: Mesh, options: Mapping[str, Any]) -> None:
    """Shards the experts of this rank over the ranks that hold the same ones.

    Args:
        options: of `fully_shard`, except the mesh.
    """
    sizes = mesh.weight_sizes
    axes = ("replicate", "shard") if sizes.replicate > 1 else ("shard",)
    for layer in routed_layers(model).values():
        fully_shard(
            layer.experts,
            **{
                **options,
                "mesh": mesh.submesh(*axes),
                "shard_placement_fn": lambda weight: Shard(shard_dim(weight, sizes.shard)),
            },
        )


def shard_dim(weight: nn.Parameter, num_shards: int) -> int:
    """First dim of this rank's part of a weight divisible by `num_shards`; 0 if there is none."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return next((dim for dim, size in enumerate(local.shape) if size % num_shards == 0), 0)


def copies_and_shards(mesh: Mesh) -> DeviceMesh:
    """The mesh for all other parameters: replicated along `replicate` and `expert` together."""
    return mesh.joined("replicate", "expert", beside="shard")


def check_experts(model: nn.Module, sizes: MeshSizes) -> None:
    """Refuses models and layouts that expert parallelism does not support.

    Raises:
        RequestError: there are no experts, the axis does not divide them, or another axis cannot
            hold routed layers; with the numbers and the nearest valid choice.
    """
    layers = routed_layers(model)
    if sizes.expert > 1 and not layers:
        raise RequestError(
            f"parallel.expert is {sizes.expert}, and the {type(model).__name__} has no experts",
            where="parallel.expert",
            rule="ranks along this axis hold different experts of routed layers (model.experts)",
            remedy=f"use parallel.shard={sizes.expert} instead, or give the model experts",
        )
    for axis in ("tensor", "pipeline") if layers else ():
        if getattr(sizes, axis) > 1:
            raise RequestError(
                f"parallel.{axis} is {getattr(sizes, axis)}, and the model has "
                f"{len(layers)} routed layers",
                where=f"parallel.{axis}",
                rule="routed layers combine with replicate, shard, context and expert only",
                remedy=f"use parallel.{axis}=1 and parallel.expert or parallel.shard",
            )
    for name, layer in layers.items():
        number = layer.config.num_experts
        if number % sizes.expert:
            fits = [n for n in range(1, number + 1) if number % n == 0]
            nearest = min(fits, key=lambda n: (abs(n - sizes.expert), n))
            raise RequestError(
                f"parallel.expert = {sizes.expert} does not divide the {number} experts of {name}",
                where="parallel.expert",
                rule="each rank along the axis holds the same number of experts",
                remedy=f"use parallel.expert={nearest}",
            )
