"""The ranks of a run as a mesh with named axes: sizes, coordinates and groups.

Sizes are checked here against the number of ranks, and against the model in `layout`.
Nothing here touches a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from surefoot.config.sections.parallel import ParallelSection
from surefoot.core.errors import RequestError

AXES: Final = ("pipeline", "replicate", "shard", "context", "expert", "tensor")
"""From slowest links to fastest: neighbours along the last axis are adjacent ranks."""
DATA_AXES: Final = ("replicate", "shard", "expert")
"""Ranks along these axes see different data."""
COSTS: Final = {
    "pipeline": "activations between stages for each micro-batch; ranks idle in the bubble",
    "replicate": "one all-reduce of the gradients an update",
    "shard": "parameters gathered for forward and backward, gradients scattered",
    "context": "two all-to-alls of activations in each layer, forward and backward",
    "expert": "tokens exchanged twice in each layer of experts",
    "tensor": "two all-reduces of activations in each layer, forward and backward",
}


class AxisRow(NamedTuple):
    """One axis, for display."""

    axis: str
    size: int
    costs: str


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis; their product is the number of ranks."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def num_ranks(self) -> int:
        return prod(self.of(AXES))

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different data."""
        return prod(self.of(DATA_AXES))

    @property
    def of_weights(self) -> MeshSizes:
        """The same ranks as weights are distributed over them.

        Ranks with parts of the same sequence need the same weights and see different items: they
        act as further shards if there are shards, else as further replicas.
        """
        joined = "shard" if self.shard > 1 else "replicate"
        return replace(self, context=1, **{joined: getattr(self, joined) * self.context})

    def of(self, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in axes)

    def used(self) -> tuple[str, ...]:
        """Axes of more than one rank, in mesh order."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1)

    @property
    def has_whole_weights(self) -> bool:
        """Whether every rank holds all weights entirely: there are replicas and no other axis."""
        return set(self.used()) <= {"replicate"}

    def table(self) -> list[AxisRow]:
        """One row per axis in use, with its communication cost."""
        return [AxisRow(axis, getattr(self, axis), COSTS[axis]) for axis in self.used()]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank along each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def data_rank(self, rank: int) -> int:
        """Index of a rank among the data-parallel ranks."""
        place = self.coordinates(rank)
        found = 0
        for axis in DATA_AXES:
            found = found * getattr(self, axis) + place[axis]
        return found

    def leads(self, rank: int) -> bool:
        """Whether a rank represents those with the same data."""
        place = self.coordinates(rank)
        return all(place[axis] == 0 for axis in AXES if axis not in DATA_AXES)


ONE_RANK: Final = MeshSizes()


def resolve_sizes(section: ParallelSection, num_ranks: int) -> MeshSizes:
    """The sizes that a recipe asks for, with `auto` filled in.

    Raises:
        RequestError: two are `auto`, or the product is not the number of ranks; names the nearest
            valid size.
    """
    asked: dict[str, int | str] = {axis: getattr(section, axis) for axis in AXES}
    open_axes = [axis for axis, size in asked.items() if size == "auto"]
    if len(open_axes) > 1 and "replicate" in open_axes:
        # `auto` here means the rest: 1 if another axis is also `auto`.
        asked["replicate"] = 1
        open_axes.remove("replicate")
    if len(open_axes) > 1:
        raise _refused(
            f"{' and '.join(open_axes)} are all auto",
            "only one axis besides replicate may be auto",
            f"set a size at parallel.{open_axes[0]}",
        )
    fixed = prod(size for size in asked.values() if isinstance(size, int))
    shown = " x ".join(f"{axis} {size}" for axis, size in asked.items() if size != 1) or "1"
    if num_ranks % fixed or (not open_axes and fixed != num_ranks):
        raise _refused(
            f"the mesh {shown} does not make {num_ranks} rank{'s' if num_ranks != 1 else ''}",
            f"the sizes multiply to the number of ranks; the given ones multiply to {fixed}",
            _nearest(asked, num_ranks, fixed, bool(open_axes)),
        )
    for axis in open_axes:
        asked[axis] = num_ranks // fixed
    return MeshSizes(**{axis: int(size) for axis, size in asked.items()})


def _nearest(asked: dict[str, int | str], num_ranks: int, fixed: int, is_open: bool) -> str:
    more = f"start {fixed} ranks" if not is_open else f"start a multiple of {fixed} ranks"
    for axis, size in asked.items():
        if isinstance(size, int) and size > 1:
            rest = fixed // size
            if num_ranks % rest == 0:
                limit = num_ranks // rest
                fits = [n for n in range(1, limit + 1) if limit % n == 0] if is_open else [limit]
                near = min(fits, key=lambda n: abs(n - size))
                return f"use parallel.{axis}={near}, or {more}"
    if not is_open and num_ranks % fixed == 0:
        return f"use parallel.replicate={num_ranks // fixed} (or auto), or {more}"
    return more


def _refused(what: str, rule: str, remedy: str) -> RequestError:
    return RequestError(what, where="parallel", rule=rule, remedy=remedy)


class Mesh:
    """The mesh of a running group of ranks.

    Args:
        sizes: number of ranks along each axis.
        device_type: of the model; selects the backend for tensors.
        host_backend: backend for host numbers.
    """

    def __init__(self, sizes: MeshSizes, device_type: str, host_backend: str = "gloo") -> None:
        self.sizes = sizes
        self.rank = dist.get_rank()
        self.weight_sizes = sizes.of_weights
        """Ranks along each axis, as weights are distributed."""
        self.weight_mesh: DeviceMesh = init_device_mesh(
            device_type, self.weight_sizes.of(AXES), mesh_dim_names=AXES
        )
        self.device_mesh = self.weight_mesh
        if sizes.context > 1:
            self.device_mesh = init_device_mesh(device_type, sizes.of(AXES), mesh_dim_names=AXES)
        # Host numbers never wait for a device.
        self.host_group: Any = dist.new_group(backend=host_backend)

    @property
    def data_rank(self) -> int:
        return self.sizes.data_rank(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank represents those with the same data."""
        return self.sizes.leads(self.rank)

    def submesh(self, *axes: str) -> DeviceMesh:
        """The mesh of some axes through this rank, as weights are distributed."""
        return self.weight_mesh[axes if len(axes) > 1 else axes[0]]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks along one axis through this rank, as weights are distributed."""
        return self.weight_mesh.get_group(axis)

    def joined(self, first: str, second: str, *, beside: str) -> DeviceMesh:
        """A 2-dim mesh through this rank: two axes merged into one, `copies`, beside a third.

        Every rank calls it, once: it creates process groups.
        """
        sizes = self.weight_sizes
        own = (first, second, beside)
        rest = [axis for axis in AXES if axis not in own]
        places = torch.arange(sizes.num_ranks).reshape(sizes.of(AXES))
        places = places.permute([AXES.index(axis) for axis in (*rest, *own)])
        places = places.reshape(prod(sizes.of(rest)), -1, getattr(sizes, beside))
        names = ("copies", beside)
        kind = self.device_mesh.device_type
        whole = DeviceMesh(kind, places, mesh_dim_names=("rest", *names))
        # Not sliced from the full mesh: older versions of torch refuse axes in another order.
        (own_place,) = (place for place in places if self.rank in place)
        return DeviceMesh.from_group(
            [whole.get_group(name) for name in names], kind, mesh=own_place, mesh_dim_names=names
        )

    @property
    def context_group(self) -> dist.ProcessGroup:
        """The ranks that hold parts of the same sequences as this rank."""
        return self.device_mesh.get_group("context")

    def item_axes(self) -> tuple[str, ...]:
        """Axes in use along which ranks see different items."""
        return tuple(axis for axis in DATA_AXES if getattr(self.weight_sizes, axis) > 1)

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over the data-parallel ranks, in place; queued, without a device sync."""
        for axis in DATA_AXES:
            if getattr(self.sizes, axis) > 1:
                group = self.device_mesh.get_group(axis)
                dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        return tensor

    def sum_over_items(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over the data-parallel ranks and over the parts of sequences, in place."""
        for axis in self.item_axes():
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group(axis))
        return tensor
