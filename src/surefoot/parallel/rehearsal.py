"""Builds a layout of any number of ranks in one process: what each rank holds, and whether it fits.

The model is on the meta device, and the process group is torch's fake one. Everything that refuses
a layout on real ranks refuses it here. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from surefoot.config.sections.optimizers import OptimizerSection, SGDSection
from surefoot.core.errors import RequestError
from surefoot.parallel.layout import LayoutRequest, Place, lay_out
from surefoot.parallel.mesh import AXES, Mesh, MeshSizes
from surefoot.parallel.parts import local_part

FAKE = "fake"
META = torch.device("meta")


@dataclass(frozen=True)
class Share:
    """Bytes that one rank holds of a model in training, without activations."""

    rank: int
    coordinates: Mapping[str, int]
    """Its coordinate along each axis of more than one rank."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of the local shard of each parameter, by name."""
    parameter_bytes: int
    """Parameters, between updates."""
    gradient_bytes: int
    """Gradients, at the end of a window."""
    optimizer_bytes: int
    """Optimizer moments."""
    gathered_bytes: int
    """Largest amount gathered at one time within a window: parameters, and gradients that are
    reduced at its end."""

    @property
    def total_bytes(self) -> int:
        return sum(
            (self.parameter_bytes, self.gradient_bytes, self.optimizer_bytes, self.gathered_bytes)
        )


@dataclass(frozen=True)
class FakeRank:
    """One of many ranks that do not exist: its own answer stands for that of all."""

    rank: int
    size: int

    def gather(self, what: str, value: Any) -> list[Any]:
        return [value] * self.size

    def channel(self, name: str) -> FakeRank:
        return self


@contextmanager
def fake_ranks(num_ranks: int, rank: int) -> Iterator[FakeRank]:
    """Context manager in which this process acts as one of `num_ranks` ranks.

    Raises:
        RequestError: this process is a rank of a real group.
    """
    if dist.is_initialized():
        raise RequestError(
            "a layout cannot be rehearsed by a process that is a rank already",
            where="layout",
            rule="the fake process group replaces the default one",
            remedy="call it from one process, without a launcher",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(FAKE, store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield FakeRank(rank, num_ranks)
    finally:
        dist.destroy_process_group()


def rehearse(
    make_model: Callable[[], nn.Module],
    request: LayoutRequest,
    sizes: MeshSizes,
    optimizer: OptimizerSection,
    rank: int,
) -> Share:
    """Lays out a model as on one rank of many, without memory.

    Args:
        make_model: creates it; its tensors are created on the meta device.
        sizes: of the full mesh.
        rank: which one to lay out.

    Raises:
        RequestError: the model does not support the layout.
    """
    with torch.device(META):
        model = make_model()
    with fake_ranks(sizes.num_ranks, rank) as fake:
        mesh = Mesh(sizes, "cpu", host_backend=FAKE)
        lay_out(model, META, request, Place(fake, mesh))
        parameters = dict(model.named_parameters())
        trained = [p for p in parameters.values() if p.requires_grad]
        cut_bytes = sum(_bytes(local_part(parameter)) for parameter in trained)
        place = sizes.coordinates(rank)
        return Share(
            rank=rank,
            coordinates={axis: place[axis] for axis in AXES if getattr(sizes, axis) > 1},
            shapes={name: tuple(local_part(p).shape) for name, p in parameters.items()},
            parameter_bytes=sum(_bytes(local_part(p)) for p in parameters.values()),
            gradient_bytes=cut_bytes,
            optimizer_bytes=cut_bytes * moments_of(optimizer),
            gathered_bytes=_gathered_bytes(model, request),
        )


def moments_of(section: OptimizerSection) -> int:
    """Number of values that an optimizer keeps per parameter element."""
    if isinstance(section, SGDSection):
        return int(section.momentum != 0)
    return 2


def sampled_ranks(sizes: MeshSizes) -> list[int]:
    """The first and last rank of each pipeline stage, which represent all others."""
    per_stage = sizes.num_ranks // sizes.pipeline
    starts = range(0, sizes.num_ranks, per_stage)
    return sorted({rank for start in starts for rank in (start, start + per_stage - 1)})


def _gathered_bytes(model: nn.Module, request: LayoutRequest) -> int:
    """Largest gathered size less the local shards, in bytes."""
    units = [module for module in model.modules() if hasattr(module, "reshard")]
    if not units:
        return 0
    own = [list(_own_parameters(unit, units)) for unit in units]
    of_root, *of_blocks = (
        sum(_whole_bytes(p) - _bytes(local_part(p)) for p in held) for held in own
    )
    match request.section.shards:
        case "parameters":
            # One block computes while the next is gathered; the root's parameters stay gathered.
            return of_root + sum(sorted(of_blocks)[-2:])
        case "gradients":
            return of_root + sum(of_blocks)
        case "optimizer":
            return 2 * (of_root + sum(of_blocks))


def _own_parameters(unit: nn.Module, units: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters that an FSDP unit gathers itself: without those of nested units."""
    inner = {
        id(parameter)
        for other in units
        if other is not unit and any(other is module for module in unit.modules())
        for parameter in other.parameters()
    }
    return (parameter for parameter in unit.parameters() if id(parameter) not in inner)


def _whole_bytes(parameter: Any) -> int:
    """Bytes of a tensor as one rank computes with it: gathered along `shard` only."""
    if not isinstance(parameter, DTensor):
        return _bytes(parameter)
    names = parameter.device_mesh.mesh_dim_names or ()
    sizes = zip(names, parameter.device_mesh.shape, parameter.placements, strict=True)
    kept = prod(size for name, size, p in sizes if name != "shard" and not p.is_replicate())
    return parameter.numel() * parameter.element_size() // kept


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
