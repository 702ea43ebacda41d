"""Splits a model into stages along the pipeline axis, as its plan says. It runs no schedule.

A rank keeps the module passed in, without the layers of other ranks; names stay: `blocks.3` is
`blocks.3` on whichever rank holds it. Each stage runs the model's own forward with stand-ins for
the rest: the list of blocks holds those of the stage, the embedding returns what the previous
stage has sent, and what follows the blocks returns its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.core.errors import ModelError, RequestError
from surefoot.core.plans import PipelinePlan, StageStyle, stages_for
from surefoot.parallel.data_parallel import MAX_NAMED
from surefoot.parallel.mesh import Mesh
from surefoot.parallel.pipeline_schedule import PipelineOrder
from surefoot.parallel.sizes import ParameterSizes
from surefoot.parallel.tensor import layers_of, shared_parameters


class Received(nn.Module):
    """Replaces the embedding: returns what the previous stage has sent."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            raise ModelError(
                "the loss calls the model more than once for a batch",
                where="parallel.pipeline",
                rule="each micro-batch passes through each stage once",
                remedy="call the model once, or use parallel.shard instead of parallel.pipeline",
            )
        return hidden


class Nothing(nn.Module):
    """Replaces what the first stage has already added: adds zero."""

    def forward(self, *_: Any, **__: Any) -> float:
        return 0.0


class Passed(nn.Module):
    """Replaces a layer of another stage: returns its input."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


STANDS_IN: dict[StageStyle, Callable[[], nn.Module]] = {
    StageStyle.ENTRY: Received,
    StageStyle.ADDED: Nothing,
    StageStyle.FIRST: Passed,
    StageStyle.LAST: Passed,
}

Work = Callable[["Stage", Tensor | None], Tensor]
"""Work of one stage on one micro-batch: from the previous stage's output to its own."""


class Stage(nn.Module):
    """One stage as torch's schedules see it: each call is the next micro-batch.

    Args:
        model: a model whose forward is that of this stage alone.
        index: of the stage.
        num_stages: of the pipeline.
    """

    def __init__(self, model: nn.Module, index: int, num_stages: int) -> None:
        super().__init__()
        self.model = model
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        # Not registered as submodules a second time.
        self._entries = tuple(module for module in model.modules() if isinstance(module, Received))
        self._work: list[Work] = []

    def begin(self, work: Sequence[Work]) -> None:
        """Sets the work of the next calls, in order."""
        self._work = list(reversed(work))

    def receive(self, hidden: Tensor) -> None:
        """Sets the input of the model's next forward."""
        for entry in self._entries:
            entry.hidden = hidden

    def forward(self, hidden: Tensor | None = None) -> Tensor:
        return self._work.pop()(self, hidden)


@dataclass(frozen=True)
class StagePlan:
    """How a model is split: which blocks and which state are on which rank."""

    plan: PipelinePlan
    order: PipelineOrder
    rank: int
    runs: tuple[range, ...]
    """The blocks of each stage, over all ranks."""
    width: int
    dtype: torch.dtype
    """Dtype of the embedding."""
    elsewhere: frozenset[str]
    """Names of the model's state on other ranks."""
    size_elsewhere: ParameterSizes
    """Sizes of the parameters on other ranks."""


class StageSync(Protocol):
    """When the gradients of a stage are reduced over ranks with other data."""

    def micro_batch(self, is_last: bool) -> object:
        """Called before the backward of a micro-batch of a window."""
        ...

    def finish(self) -> None:
        """Called after the last backward of a window: `.grad` holds the reduced gradients."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """The stages of this rank, and what they exchange with other ranks."""

    model: nn.Module
    """Holds all layers of this rank, under their own names."""
    stage_plan: StagePlan
    stages: tuple[Stage, ...]
    syncs: tuple[StageSync, ...]
    """One per stage."""
    group: dist.ProcessGroup
    """The ranks of the pipeline axis."""
    device: torch.device
    dtype: torch.dtype
    """Dtype of activations between stages."""
    sequence_part: tuple[int, int] = (0, 1)
    """(index, count): which part of each sequence this rank exchanges between stages."""

    @property
    def order(self) -> PipelineOrder:
        return self.stage_plan.order

    @property
    def width(self) -> int:
        """Last dim of activations between stages: [batch, sequence, width]."""
        return self.stage_plan.width

    def sync_of(self, stage: Stage) -> StageSync:
        return self.syncs[self.stages.index(stage)]

    def hidden_shape(self, tokens: Tensor) -> tuple[int, int]:
        """Batch and sequence length of activations between stages, for token ids [B, S]."""
        batch, length = tokens.shape
        part, parts = self.sequence_part
        share = -(-length // parts)
        return batch, max(0, min(share, length - part * share))

    def follow_modes(self) -> None:
        """Sets the train mode of copied stages to that of the model."""
        for stage in self.stages:
            stage.model.training = self.model.training

    def from_last(self, numbers: Sequence[Tensor] | None, count: int) -> Tensor:
        """Broadcasts values, [count] in float64, from the last stage to every rank of the pipeline.

        Args:
            numbers: 0-dim tensors on the rank of the last stage; None elsewhere.
        """
        if numbers is None:
            values = torch.zeros(count, dtype=torch.float64, device=self.device)
        else:
            values = torch.stack([number.detach().double() for number in numbers])
        self._broadcast_from_last(values)
        return values

    def text_from_last(self, text: str | None) -> str:
        """Broadcasts a text from the last stage to every rank of the pipeline."""
        own = list((text or "").encode())
        length = torch.tensor([len(own)], device=self.device)
        self._broadcast_from_last(length)
        encoded = torch.tensor(own or [0] * int(length), dtype=torch.uint8, device=self.device)
        self._broadcast_from_last(encoded)
        return bytes(encoded.tolist()).decode()

    def _broadcast_from_last(self, tensor: Tensor) -> None:
        last = self.order.rank_of(self.order.num_stages - 1)
        dist.broadcast(tensor, src=dist.get_global_rank(self.group, last), group=self.group)


def remove_other_stages(model: nn.Module, order: PipelineOrder, rank: int) -> StagePlan:
    """Removes the layers of other ranks, in place; names stay.

    Args:
        rank: along the pipeline axis.

    Raises:
        RequestError: no plan knows the model, it has too few layers, two stages would share a
            tensor, or a stage would have nothing to train.
    """
    plan = stages_for(name for name, _ in layers_of(model))
    if plan is None:
        raise RequestError(
            f"no plan says how a {type(model).__name__} is split into stages",
            where="parallel.pipeline",
            rule="plans are known for our GPT and for transformers' Llama, Qwen and Mistral",
            remedy="use parallel.shard, which works for any model",
        )
    blocks = model.get_submodule(plan.blocks)
    assert isinstance(blocks, nn.ModuleList)
    refuse_kinds(model)
    runs = runs_of_blocks(len(blocks), order)
    refuse_shared(model, plan, runs)
    names, size = frozenset(model.state_dict()), ParameterSizes.of(model)
    entry = next(name for name, style in plan.others.items() if style is StageStyle.ENTRY)
    dtype = next(model.get_submodule(entry).parameters()).dtype
    refuse_idle(model, plan, order, runs)
    own = [stage for stage in range(order.num_stages) if order.rank_of(stage) == rank]
    keep_stages(model, plan, runs, own)
    elsewhere = names - frozenset(model.state_dict())
    width = int(getattr(model.config, plan.width))
    size -= ParameterSizes.of(model)
    return StagePlan(plan, order, rank, tuple(runs), width, dtype, elsewhere, size)


def make_stages(model: nn.Module, stage_plan: StagePlan) -> tuple[Stage, ...]:
    """The stages of this rank; several share layers with `model`, a single one is `model`."""
    own = stage_plan.order.stages_of(stage_plan.rank)
    stages = []
    for index in own:
        part = model
        if len(own) > 1:
            part = copied_along(model, stage_plan.plan)
            keep_stages(part, stage_plan.plan, stage_plan.runs, [index])
        stages.append(Stage(part, index, stage_plan.order.num_stages))
    return tuple(stages)


def runs_of_blocks(num_blocks: int, order: PipelineOrder) -> list[range]:
    """The blocks of each stage: as even as possible; the first stages hold one more.

    Raises:
        RequestError: there are fewer blocks than stages.
    """
    number = order.num_stages
    if num_blocks < number:
        per_rank = order.stages_per_rank
        most = max(1, num_blocks // per_rank)
        raise RequestError(
            f"{num_blocks} layers for {number} stages ({order.num_ranks} ranks of {per_rank})",
            where="parallel.pipeline",
            rule="each stage holds at least one layer",
            remedy=f"use parallel.pipeline={most}"
            + (" or fewer stages on each rank" if per_rank > 1 else ""),
        )
    share, more = divmod(num_blocks, number)
    ends = [share * (stage + 1) + min(stage + 1, more) for stage in range(number)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def stage_of_layer(name: str, plan: PipelinePlan, runs: Sequence[range]) -> int:
    """The stage that holds a layer, by the layer's or its parameter's dotted name."""
    inside = f"{plan.blocks}."
    if name.startswith(inside):
        index = int(name[len(inside) :].partition(".")[0])
        return next(stage for stage, run in enumerate(runs) if index in run)
    style = next(s for known, s in plan.others.items() if f"{name}.".startswith(f"{known}."))
    return len(runs) - 1 if style is StageStyle.LAST else 0


def refuse_shared(model: nn.Module, plan: PipelinePlan, runs: Sequence[range]) -> None:
    """Refuses tensors that two stages would share.

    Raises:
        RequestError: with their names.
    """
    for alias, name in shared_parameters(model).items():
        first, second = (stage_of_layer(n, plan, runs) for n in (name, alias))
        if first != second:
            raise RequestError(
                f"{alias} is {name}, and they are on the stages {second} and {first}",
                where="parallel.pipeline",
                rule="a tensor is on one stage: tied embeddings would be on the first and the last",
                remedy="use model.tied=false, or parallel.shard instead of parallel.pipeline",
            )


def refuse_kinds(model: nn.Module) -> None:
    """Refuses layers whose forward depends on their index in the list, as in some transformers.

    Raises:
        RequestError: with the kinds of layers.
    """
    kinds = sorted(set(getattr(model.config, "layer_types", None) or ()))
    if len(kinds) > 1:
        raise RequestError(
            f"the layers of a {type(model).__name__} have the types {', '.join(kinds)}",
            where="parallel.pipeline",
            rule="a stage numbers its own layers from 0, so all must be of one type",
            remedy="use parallel.shard instead of parallel.pipeline",
        )


def refuse_idle(
    model: nn.Module, plan: PipelinePlan, order: PipelineOrder, runs: Sequence[range]
) -> None:
    """Refuses a rank with nothing to train.

    Raises:
        RequestError: with the rank's layers.
    """
    trained = {
        order.rank_of(stage_of_layer(name, plan, runs))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    idle = [rank for rank in range(order.num_ranks) if rank not in trained]
    if idle:
        raise RequestError(
            f"all layers of pipeline rank {idle[0]} are frozen",
            where="parallel.pipeline",
            rule="each pipeline rank has parameters to train",
            remedy="use fewer pipeline ranks, or unfreeze some of its layers",
        )


def keep_stages(
    model: nn.Module, plan: PipelinePlan, runs: Sequence[range], stages: Sequence[int]
) -> None:
    """Removes all layers but those of some stages, in place; blocks keep their numbers."""
    kept = {str(index) for stage in stages for index in runs[stage]}
    blocks = model.get_submodule(plan.blocks)
    for name in list(blocks._modules):
        if name not in kept:
            del blocks._modules[name]
    for name, style in plan.others.items():
        holder, _, attribute = name.rpartition(".")
        there = getattr(model.get_submodule(holder), attribute, None)
        if there is not None and stage_of_layer(name, plan, runs) not in stages:
            setattr(model.get_submodule(holder), attribute, STANDS_IN[style]())


def copied_along(model: nn.Module, plan: PipelinePlan) -> nn.Module:
    """A copy of a module that shares all children but the ancestors of what a plan names."""
    copied = _shallow(model)
    names = (f"{plan.blocks}.0", *plan.others)
    holders = {
        ".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)
    }
    for holder in sorted(holders, key=lambda name: name.count(".")):
        above, _, attribute = holder.rpartition(".")
        parent = copied.get_submodule(".".join(above))
        parent._modules[attribute] = _shallow(parent.get_submodule(attribute))
    return copied


def _shallow(module: nn.Module) -> nn.Module:
    copied = module.__new__(type(module))
    copied.__dict__ = {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in module.__dict__.items()
    }
    return copied


class StageReplicas:
    """Replicas of a stage: sums their gradients once per window, after its last backward.

    Args:
        model: of one stage.
        group: the ranks that hold its replicas.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._group = group

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self) -> None:
        """Leaves the sums in `.grad`.

        Raises:
            ModelError: a parameter was not used by the loss; another replica may wait for its sum.
        """
        idle = [name for name, parameter in self._trained.items() if parameter.grad is None]
        if idle:
            raise ModelError(
                "a parameter was not used by the loss: the replicas' gradients were not summed",
                where=", ".join(idle[:MAX_NAMED]),
                rule="replicas sum the gradients of all parameters once per window",
                remedy="freeze what is not used (model.frozen)",
            )
        gradients = [p.grad for p in self._trained.values() if p.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            same = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in same])
            dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=self._group)
            parts = flat.split([gradient.numel() for gradient in same])
            torch._foreach_copy_(same, [p.view_as(g) for p, g in zip(parts, same, strict=True)])


def keep_own_stages(model: nn.Module, request: Any, mesh: Mesh) -> StagePlan | None:
    """Removes the layers of other stages, if the mesh has any; see `remove_other_stages`.

    Args:
        request: see `layout.LayoutRequest`.

    Raises:
        RequestError: the model, or the rest of the layout, does not support stages.
    """
    if mesh.sizes.pipeline == 1:
        return None
    refuse_split_backward(request, mesh)
    if request.section.unused_parameters == "find":
        raise RequestError(
            "parallel.unused_parameters is find, and parallel.pipeline is above 1",
            where="parallel.unused_parameters",
            rule="replicas of a stage sum the gradients of all its parameters",
            remedy="leave it out, and freeze what is not used (model.frozen)",
        )
    order = PipelineOrder.of(request.section, mesh.sizes.pipeline)
    order.check_window(request.window)
    return remove_other_stages(model, order, mesh.sizes.coordinates(mesh.rank)["pipeline"])


def refuse_split_backward(request: Any, mesh: Mesh) -> None:
    """Refuses what cannot be combined with zero-bubble, which splits each backward in two.

    Raises:
        RequestError: with another schedule, or another option.
    """
    section, sizes = request.section, mesh.sizes
    if section.pipeline_schedule != "zero-bubble":
        return
    if request.compile == "blocks":
        raise RequestError(
            "train.compile is blocks, and the schedule is zero-bubble",
            where="train.compile",
            rule="a compiled backward cannot be split into input gradients and weight gradients",
            remedy="use train.compile=off, or parallel.pipeline_schedule=1f1b",
        )
    if request.memory.recompute != "none":
        raise RequestError(
            f"memory.recompute is {request.memory.recompute}, and the schedule is zero-bubble",
            where="memory.recompute",
            rule="weight gradients are computed one by one; each would recompute its block again",
            remedy="use parallel.pipeline_schedule=1f1b, or memory.recompute=none",
        )
    is_sharded = sizes.shard > 1 or (sizes.tensor > 1 and sizes.replicate > 1)
    if is_sharded and section.shards != "optimizer":
        raise RequestError(
            f"parallel.shards is {section.shards}, and the schedule is zero-bubble",
            where="parallel.shards",
            rule="a stage stays gathered between the two parts of its backward",
            remedy="use parallel.shards=optimizer, or parallel.pipeline_schedule=1f1b",
        )
