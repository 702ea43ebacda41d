"""Lays a model out over the ranks: the one place that says in which order it is changed.

Tensor parallel, then recompute, then compile, then sharding or replicas. The module that is handed
in stays the one whose names and state count; nothing here trains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from surefoot.config.sections.parallel import ParallelSection
from surefoot.core.errors import RequestError
from surefoot.parallel.data_parallel import Replicas
from surefoot.parallel.mesh import ONE_RANK, Mesh, MeshSizes, resolve_sizes
from surefoot.parallel.ranks import OneRank, Ranks, world_ranks


class GradientSync(Protocol):
    """When the gradients of a laid-out model are reduced."""

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        """The context of the forward and backward of one micro-batch of a window."""
        ...

    def finish(self) -> None:
        """After the last backward of a window: gradients are whole in `.grad`."""
        ...


class NoSync:
    """One rank, or replicas along no axis."""

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self) -> None:
        return None


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks of the run."""

    ranks: Ranks
    mesh: Mesh | None = None
    """None for a run of one rank."""

    @property
    def sizes(self) -> MeshSizes:
        return ONE_RANK if self.mesh is None else self.mesh.sizes

    @property
    def speaks(self) -> bool:
        """Whether this rank has the whole model and speaks for all: rank 0 of plain replicas."""
        return self.ranks.rank == 0 and self.sizes.used() in ((), ("replicate",))

    @property
    def data_rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.data_rank

    @property
    def num_data_ranks(self) -> int:
        return self.sizes.data_parallel


ALONE = Place(OneRank())


def find_place(section: ParallelSection, device: torch.device) -> Place:
    """The place of this process on the mesh that the recipe asks for.

    Raises:
        RequestError: the mesh does not fit the ranks that there are.
    """
    ranks = world_ranks(float(section.deadline.value))
    sizes = resolve_sizes(section, ranks.size)
    if ranks.size == 1:
        return ALONE
    if device.type not in ("cpu", "cuda"):
        raise RequestError(
            f"{ranks.size} ranks cannot train on {device.type}",
            where="device",
            rule="ranks exchange tensors on the CPU (gloo) or on CUDA (NCCL)",
            remedy="use device=cpu, or one process",
        )
    return Place(ranks, Mesh(sizes, device.type))


@dataclass(frozen=True)
class LaidOut:
    """A model as it is trained."""

    forward: nn.Module
    """What the training calls; the module itself, or a wrapper around it."""
    sync: GradientSync


def lay_out(
    model: nn.Module,
    device: torch.device,
    section: ParallelSection,
    place: Place,
    compiled: Callable[[nn.Module], None],
) -> LaidOut:
    """Puts a model on its device and lays it out.

    Args:
        compiled: compiles in place.

    Raises:
        RequestError: the model cannot be laid out so.
    """
    model.to(device)
    compiled(model)
    if place.mesh is None:
        return LaidOut(model, NoSync())
    replicas = Replicas.of(model, place.mesh, device)
    return LaidOut(replicas.wrapped, replicas)
