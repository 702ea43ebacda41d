"""Local shards of a tensor, and norms over all shards. Moves no shard.

Elementwise operations (clipping, scaling, averaging) work on local shards; a norm needs the other
ranks, and sends one number per kind of sharding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.numerics.clipping import tensor_norms
from surefoot.parallel.mesh import AXES, Mesh


def local_part(tensor: Tensor) -> Tensor:
    """The local shard of a tensor, sharing its memory; a plain tensor is its own shard."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def local_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that exist, as local shards, in the order of the parameters."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """Mesh axes along which ranks hold different shards of a tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    pairs = zip(names, tensor.placements, strict=True)
    # A dim sharded twice has a placement that torch does not call Shard.
    found = {name for name, placement in pairs if not placement.is_replicate()}
    return tuple(axis for axis in AXES if axis in found)


class ShardedNorm:
    """The L2 norm of all parameters' gradients (or values), the same on every rank.

    The squared norm of a shard is summed over the ranks that hold other shards, never over
    replicas.

    Args:
        parameters: in model order.
        mesh: of the run.
    """

    def __init__(self, parameters: Sequence[Tensor], mesh: Mesh) -> None:
        self._parameters = parameters
        self._mesh = mesh
        self._axes = [sharded_axes(parameter) for parameter in parameters]

    def of_gradients(self, gradients: Sequence[Tensor]) -> Tensor:
        """0-dim; `gradients` are the `local_gradients` of the same parameters."""
        pairs = zip(self._parameters, self._axes, strict=True)
        return self._norm(gradients, [axes for p, axes in pairs if p.grad is not None])

    def of_values(self) -> Tensor:
        """0-dim, of the parameters themselves."""
        return self._norm([local_part(p.detach()) for p in self._parameters], self._axes)

    def _norm(self, parts: Sequence[Tensor], axes: Sequence[tuple[str, ...]]) -> Tensor:
        if not parts:
            return self._over_stages(torch.zeros((), device=self._parameters[0].device)).sqrt()
        kinds = list(dict.fromkeys(axes))
        squares = torch.stack(
            [
                tensor_norms([p for p, of in zip(parts, axes, strict=True) if of == kind])
                .square()
                .sum()
                for kind in kinds
            ]
        )
        for axis in dict.fromkeys(axis for kind in kinds for axis in kind):
            held = torch.tensor([axis in kind for kind in kinds], device="cpu").nonzero().flatten()
            places = held.to(squares.device)
            summed = squares[places]
            dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=self._mesh.group(axis))
            squares = squares.index_copy(0, places, summed)
        return self._over_stages(squares.sum()).sqrt()

    def _over_stages(self, square: Tensor) -> Tensor:
        """Summed over the ranks that hold other layers."""
        if self._mesh.sizes.pipeline > 1:
            square = square.double()
            dist.all_reduce(square, op=dist.ReduceOp.SUM, group=self._mesh.group("pipeline"))
        return square
