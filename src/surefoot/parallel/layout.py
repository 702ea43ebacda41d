"""Applies parallelism, recompute and compile to a model: the one place that fixes their order.

First the layers of other pipeline stages are removed; then tensor parallelism, context
parallelism, experts, recompute, compile, and last sharding or replicas. The module passed in keeps
its names and state; nothing here trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from surefoot.config.sections.memory import MemorySection
from surefoot.config.sections.parallel import ParallelSection
from surefoot.core.errors import RequestError
from surefoot.memory.offload import offload_blocks
from surefoot.memory.recompute import recompute_blocks
from surefoot.memory.recompute_budget import budget_blocks
from surefoot.parallel.compilation import Extent, compile_model
from surefoot.parallel.context import exchange_heads
from surefoot.parallel.data_parallel import Replicas
from surefoot.parallel.expert import check_experts, spread_experts
from surefoot.parallel.fsdp import Shards, precision_policy
from surefoot.parallel.mesh import ONE_RANK, Mesh, MeshSizes, resolve_sizes
from surefoot.parallel.pipeline import (
    Pipeline,
    StagePlan,
    StageReplicas,
    keep_own_stages,
    make_stages,
)
from surefoot.parallel.ranks import OneRank, Ranks, world_ranks
from surefoot.parallel.tensor import TensorParallel, parallelize_layers


class GradientSync(Protocol):
    """When the gradients of a distributed model are reduced."""

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        """Context manager for the forward and backward of one micro-batch of a window."""
        ...

    def finish(self) -> None:
        """Called after the last backward of a window: `.grad` holds the reduced gradients."""
        ...


class NoSync:
    """One rank, or nothing to reduce."""

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self) -> None:
        return None


@dataclass(frozen=True)
class Place:
    """The position of this process among the ranks of the run."""

    ranks: Ranks
    mesh: Mesh | None = None
    """None for a run of one rank."""

    @property
    def sizes(self) -> MeshSizes:
        return ONE_RANK if self.mesh is None else self.mesh.sizes

    @property
    def owns_folder(self) -> bool:
        """Whether this rank owns the run folder, and writes for all."""
        return self.ranks.rank == 0

    @property
    def has_whole_model(self) -> bool:
        """Whether one rank can call the model by itself: a single rank, or plain replicas."""
        return self.sizes.used() in ((), ("replicate",))

    @property
    def data_rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.data_rank

    @property
    def item_rank(self) -> int:
        """Index of this rank among the ranks that see different samples or parts of them."""
        if self.mesh is None:
            return 0
        part = self.sizes.coordinates(self.mesh.rank)["context"]
        return self.data_rank * self.sizes.context + part

    @property
    def random_rank(self) -> int:
        """Ranks with the same number draw the same random numbers: same items, same layers.

        Rank 0 has number 0.
        """
        if self.mesh is None:
            return 0
        stage = self.sizes.coordinates(self.mesh.rank)["pipeline"]
        return stage * self.num_data_ranks * self.sizes.context + self.item_rank

    @property
    def num_data_ranks(self) -> int:
        return self.sizes.data_parallel


ALONE = Place(OneRank())


def find_place(section: ParallelSection, device: torch.device) -> Place:
    """The position of this process on the mesh that the recipe asks for.

    Raises:
        RequestError: the mesh does not fit the number of ranks.
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
    """A model ready for training on this rank."""

    forward: nn.Module
    """What training calls: the module itself, or a wrapper around it."""
    sync: GradientSync
    is_sharded: bool = False
    """Whether its parameters are DTensors."""
    reshard_all: Callable[[], None] = lambda: None
    """Reshards gathered parameters, such as after an evaluation."""
    pipeline: Pipeline | None = None
    """The pipeline stages of this rank; None if it holds all layers."""


@dataclass(frozen=True)
class LayoutRequest:
    """The parts of a recipe that decide the layout."""

    section: ParallelSection
    compile: Extent = "off"
    compute_dtype: torch.dtype = torch.float32
    """Dtype of the forward."""
    memory: MemorySection = field(default_factory=MemorySection)
    window: int = 1
    """Micro-batches per update on one rank."""
    channels_last: bool = False
    """Whether the weights of 2-D convolutions lie with their channels innermost."""


def lay_out(
    model: nn.Module, device: torch.device, request: LayoutRequest, place: Place
) -> LaidOut:
    """Moves a model to its device and applies the layout.

    Raises:
        RequestError: the model does not support the layout.
    """
    section, mesh = request.section, place.mesh
    check_experts(model, place.sizes)
    stage_plan = None if mesh is None else keep_own_stages(model, request, mesh)
    model.to(device)
    if request.channels_last:
        # Outputs of a convolution lie as its weights do, so that no kernel turns them round.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if not place.sizes.has_whole_weights and request.compile == "whole":
        raise RequestError(
            "train.compile is whole, and the parameters are distributed over ranks",
            where="train.compile",
            rule="ranks communicate between blocks, so only blocks can be compiled",
            remedy="use train.compile=blocks",
        )
    if mesh is not None and mesh.sizes.tensor > 1:
        parallelize_layers(
            model,
            mesh.submesh("tensor"),
            sequence_parallel=section.cut_sequence,
            vocabulary_parallel=section.cut_logits,
        )
    if mesh is not None and mesh.sizes.context > 1:
        exchange_heads(model, mesh, section)
    if mesh is not None and mesh.sizes.expert > 1:
        spread_experts(model, mesh)
    if request.memory.recompute == "budget":
        budget_blocks(model, request.memory.recompute_budget_mib << 20)
    else:
        recompute_blocks(model, request.memory.recompute, request.memory.recompute_every)
    if request.memory.offload_activations == "cpu":
        _refuse_parts_on_host(place.sizes)
        offload_blocks(model, device)
    compile_model(model, request.compile)
    if mesh is None:
        return LaidOut(model, NoSync())
    if stage_plan is not None:
        return lay_out_stages(model, device, request, mesh, stage_plan)
    sizes = mesh.weight_sizes
    if sizes.tensor > 1 and sizes.data_parallel == 1:
        return LaidOut(model, TensorParallel(model), is_sharded=True)
    if sizes.shard > 1 or sizes.tensor > 1 or sizes.expert > 1:
        # Replicas of tensor-parallel layers are shards over one rank each.
        shards = Shards.of(model, section, mesh, request.compute_dtype)
        return LaidOut(model, shards, is_sharded=True, reshard_all=shards.reshard)
    if device.type == "meta":
        # A rehearsal: replicas hold the whole model, and there is nothing yet to sum.
        return LaidOut(model, NoSync())
    find_unused = section.unused_parameters == "find"
    by_blocks = request.compile == "blocks"
    replicas = Replicas.of(model, mesh, device, find_unused=find_unused, by_blocks=by_blocks)
    return LaidOut(replicas.wrapped, replicas)


def _refuse_parts_on_host(sizes: MeshSizes) -> None:
    if sizes.tensor > 1:
        raise RequestError(
            f"memory.offload_activations is cpu, and parallel.tensor is {sizes.tensor}",
            where="memory.offload_activations",
            rule="activations of tensor-parallel layers are DTensors, which cannot be offloaded",
            remedy="use memory.recompute=blocks with parallel.tensor",
        )


def lay_out_stages(
    model: nn.Module,
    device: torch.device,
    request: LayoutRequest,
    mesh: Mesh,
    stage_plan: StagePlan,
) -> LaidOut:
    """Lays out the stages of this rank: each is sharded or replicated separately.

    With a split backward no hook knows when a gradient is complete: torch's schedule then reduces
    the shards at the end, of a stage that is itself an FSDP module.
    """
    section, sizes = request.section, mesh.sizes
    stages = make_stages(model, stage_plan)
    syncs: Sequence[GradientSync]
    shards: list[Shards] = []
    is_sharded = sizes.tensor > 1 or sizes.shard > 1
    dtype = stage_plan.dtype
    if sizes.shard > 1 or (sizes.tensor > 1 and sizes.replicate > 1):
        by_torch = stage_plan.order.kind == "zero-bubble"
        roots = stages if by_torch else [stage.model for stage in stages]
        shards = [Shards.of(root, section, mesh, request.compute_dtype) for root in roots]
        syncs = [NoSync() for _ in stages] if by_torch else shards
        dtype = precision_policy(section, request.compute_dtype).param_dtype or dtype
    elif sizes.tensor > 1:
        syncs = [TensorParallel(stage.model) for stage in stages]
    elif sizes.replicate > 1:
        syncs = [StageReplicas(stage.model, mesh.group("replicate")) for stage in stages]
    else:
        syncs = [NoSync() for _ in stages]

    def reshard_all() -> None:
        for each in shards:
            each.reshard()

    parts = sizes.tensor if section.cut_sequence else 1
    pipeline = Pipeline(
        model,
        stage_plan,
        stages,
        tuple(syncs),
        mesh.group("pipeline"),
        device,
        dtype,
        (sizes.coordinates(mesh.rank)["tensor"] % parts, parts),
    )
    return LaidOut(model, NoSync(), is_sharded, reshard_all, pipeline)
