"""Context parallelism: each rank holds a part of every sequence; attention exchanges them.

Every rank runs the full model on its own positions. Around attention the ranks exchange heads for
positions: each sends its positions of some heads and receives all positions of its own heads
(DeepSpeed Ulysses, Jacobs et al. 2023, arXiv 2309.14509), with torch's differentiable all-to-all;
or keys and values are passed around a ring (`ring`). Labels are shifted before a sequence is
split. Losses, metrics and gradients summed over the ranks equal those of the whole sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from surefoot.config.sections.parallel import ParallelSection
from surefoot.core.errors import DataError, RequestError
from surefoot.core.plans import ContextPlan, context_for
from surefoot.models.moe import routed_layers
from surefoot.parallel.mesh import Mesh, MeshSizes
from surefoot.parallel.ring import Ring, pass_around
from surefoot.tasks.calling import signature_of
from surefoot.tasks.losses import IGNORE_INDEX
from surefoot.tasks.metrics import MetricTotals
from surefoot.tasks.scoring import Places
from surefoot.tasks.task import LossSum, MetricSums, Task
from surefoot.tasks.wrapper import TaskWrapper


@runtime_checkable
class PlacedTask(Task, Protocol):
    """A task whose loss is a sum over the positions of sequences."""

    def places(self, batch: Any) -> Places: ...

    def loss_of(self, model: nn.Module, places: Places) -> LossSum: ...

    def metrics_of(self, model: nn.Module, places: Places) -> MetricSums: ...


@dataclass(frozen=True)
class SequenceParts:
    """How sequences are split: into equal contiguous parts, in rank order.

    Args:
        rank: of this process along the context axis.
        num_parts: number of ranks along the context axis.
        multiple: whole sequences are padded at the end to a multiple of this length; padded
            positions predict nothing, and no earlier position attends to them.
        longest: largest length of a whole sequence.
        may_fill: whether padding is allowed; a router would count padded positions.
    """

    rank: int
    num_parts: int
    multiple: int
    longest: int
    may_fill: bool = True

    def own(self, places: Places) -> Places:
        """This rank's part. Positions are those in the whole sequence.

        Raises:
            DataError: a sequence is too long, or an input cannot be split.
        """
        batch, length = places.expected.shape
        if length > self.longest:
            raise DataError(
                f"sequences of {length} tokens",
                where="input_ids",
                rule=f"[batch, sequence], sequence from 1 to {self.longest}",
                remedy="shorten the sequences, or build the model with a longer sequence_length",
            )
        if not self.may_fill and length % self.multiple:
            raise DataError(
                f"sequences of {length} tokens in {self.num_parts} parts of a model with experts",
                where="input_ids",
                rule=f"a router counts every position: the length is a multiple of {self.multiple}",
                remedy=f"use sequences of {length - length % self.multiple or self.multiple} "
                "tokens",
            )
        inputs = {n: self._split_input(n, v, (batch, length)) for n, v in places.inputs.items()}
        if "position_ids" not in inputs:
            positions = torch.arange(length, device=places.expected.device)
            inputs["position_ids"] = self._split(positions.expand(batch, length), 0)
        return Places(inputs, self._split(places.expected, IGNORE_INDEX))

    def _split_input(self, name: str, value: Any, shape: tuple[int, int]) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        if tuple(value.shape[:2]) != shape:
            raise DataError(
                f"{name} has shape {list(value.shape)}",
                where=name,
                rule=f"with parallel.context, inputs are split along the sequence: {[*shape]}",
                remedy="leave it out of the batch, or use parallel.context=1",
            )
        return self._split(value, 0)

    def _split(self, values: Tensor, fill: int) -> Tensor:
        filled = F.pad(
            values, (0, 0) * (values.dim() - 2) + (0, -values.shape[1] % self.multiple), value=fill
        )
        size = filled.shape[1] // self.num_parts
        return filled.narrow(1, self.rank * size, size)


class ContextTask(TaskWrapper):
    """A task on parts of sequences: losses of this rank's positions, metrics of all positions.

    Args:
        task: the task on whole sequences.
        parts: how sequences are split.
        group: the ranks that hold the other parts.
    """

    def __init__(self, task: PlacedTask, parts: SequenceParts, group: dist.ProcessGroup) -> None:
        super().__init__(task)
        self._placed = task
        self._parts = parts
        self._group = group

    def loss_sum(self, model: nn.Module, batch: Any) -> LossSum:
        """Over this rank's positions; the losses of the ranks add up to that of the batch."""
        return self._placed.loss_of(model, self._parts.own(self._placed.places(batch)))

    def metric_sums(self, model: nn.Module, batch: Any) -> MetricSums:
        """Over all positions; the same on each rank."""
        totals = MetricTotals()
        totals.add(self._placed.metrics_of(model, self._parts.own(self._placed.places(batch))))
        totals.combine(self._summed)
        return dict(totals.pairs())

    def _summed(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self._group)
        return values


def shard_sequence(
    task: Task, model: nn.Module, mesh: Mesh | None, section: ParallelSection
) -> Task:
    """The task on this rank's parts of the sequences; the task itself if they are not split.

    Raises:
        RequestError: sequences of this task or this model cannot be split.
    """
    if mesh is None or mesh.sizes.context == 1:
        return task
    if mesh.sizes.pipeline > 1:
        raise RequestError(
            f"parallel.context = {mesh.sizes.context}, and parallel.pipeline is above 1",
            where="parallel.context",
            rule="context parallelism combines with replicate, shard, expert and tensor only",
            remedy="use parallel.context=1, or parallel.pipeline=1",
        )
    if not isinstance(task, PlacedTask):
        raise RequestError(
            f"a {type(task).__name__} cannot be computed on parts of sequences",
            where="parallel.context",
            rule="only next-token prediction (GenerationTask) without further metrics can be split",
            remedy="use parallel.context=1, or a GenerationTask",
        )
    sizes = mesh.sizes
    plan = checked_plan(model, sizes, section)
    rank = sizes.coordinates(mesh.rank)["context"]
    multiple = sizes.context * (sizes.tensor if section.cut_sequence else 1)
    config: Any = model.config
    longest = getattr(config, plan.longest)
    routed = routed_layers(model).values()
    if any(layer.depends_on_split for layer in routed):
        raise RequestError(
            f"parallel.context = {sizes.context}, and the experts have a capacity",
            where="parallel.context",
            rule="which tokens are dropped depends on the other tokens of a rank: the loss would "
            "depend on the split",
            remedy="use capacity_factor=dropless, or parallel.context=1",
        )
    parts = SequenceParts(rank, sizes.context, multiple, longest, may_fill=not routed)
    return ContextTask(task, parts, mesh.context_group)


def exchange_heads(model: nn.Module, mesh: Mesh, section: ParallelSection) -> None:
    """Exchanges heads or keys around the model's attention, in place; names stay.

    Raises:
        RequestError: the model has no plan, its heads do not divide, or a ring is not possible.
    """
    plan = checked_plan(model, mesh.sizes, section)
    exchange, ring = HeadExchange(mesh.context_group), Ring(mesh.context_group)
    for name, module in model.named_modules():
        if plan.exchanges(name) and section.context_exchange == "ring":
            pass_around(module, ring)
        elif plan.exchanges(name):
            module.register_forward_pre_hook(exchange.before)
            module.register_forward_hook(exchange.after)
        elif name in plan.whole:
            module.register_forward_pre_hook(exchange.gathered)


class HeadExchange:
    """Exchanges heads for positions around attention, and back; differentiable.

    Args:
        group: the ranks that hold the parts of the same sequences.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = group.size()

    def before(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Query, key and value [B, H, S / ranks, D] to [B, H / ranks, S, D], in one exchange."""
        query, key, value, *others = inputs
        parts = [self._by_rank(heads) for heads in (query, key, value)]
        traded = self._all_to_all(torch.cat(parts, dim=2))
        split = traded.split([part.shape[2] for part in parts], dim=2)
        return (*(part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in split), *others)

    def after(self, _: nn.Module, inputs: Any, mixed: Tensor) -> Tensor:
        """[B, H / ranks, S, D] to [B, H, S / ranks, D]."""
        by_place = mixed.unflatten(2, (self._size, -1)).permute(2, 0, 1, 3, 4)
        return self._all_to_all(by_place).permute(1, 0, 2, 3, 4).flatten(1, 2)

    def gathered(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first input, [B, S / ranks], as [B, S]; it has no gradient."""
        first, *others = inputs
        own = first.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(parts, own, group=self._group)
        return (torch.cat(parts, dim=1), *others)

    def _by_rank(self, heads: Tensor) -> Tensor:
        """[B, H, s, D] to [ranks, B, H / ranks, s, D]."""
        out: Tensor = heads.unflatten(1, (self._size, -1)).transpose(0, 1)
        return out

    def _all_to_all(self, parts: Tensor) -> Tensor:
        """Gives part i of the first dim to rank i and gets one from each."""
        return all_to_all_single_autograd(parts.contiguous(), None, None, self._group)


def checked_plan(model: nn.Module, sizes: MeshSizes, section: ParallelSection) -> ContextPlan:
    """The context plan of a model, checked against the number of ranks.

    Raises:
        RequestError: no plan, or the heads do not divide; the message names the nearest valid size.
    """
    plan = context_for(name for name, _ in model.named_modules())
    if plan is None or "position_ids" not in signature_of(model).names:
        raise RequestError(
            f"no plan says where the attention of a {type(model).__name__} is",
            where="parallel.context",
            rule="a plan is known for our GPT, whose attention is a module of its own",
            remedy="use parallel.context=1 (parallel.tensor with cut_sequence, or "
            "memory.recompute, save memory too)",
        )
    if section.context_exchange == "ring":
        return plan
    num_parts, num_tensor = sizes.context, sizes.tensor
    config: Any = model.config
    heads: Mapping[str, int] = {name: getattr(config, name) for name in plan.heads}
    broken = [f"{n} = {size}" for n, size in heads.items() if size % (num_parts * num_tensor)]
    if broken:
        along = f" x parallel.tensor = {num_tensor}" if num_tensor > 1 else ""
        fits = [
            n
            for n in range(1, max(heads.values()) + 1)
            if all(size % (n * num_tensor) == 0 for size in heads.values())
        ] or [1]
        nearest = min(fits, key=lambda n: (abs(n - num_parts), n))
        raise RequestError(
            f"parallel.context = {num_parts}{along} does not divide {', '.join(broken)}",
            where="parallel.context",
            rule="around attention each rank holds the same number of heads, of all positions",
            remedy=f"use parallel.context={nearest}, or parallel.context_exchange=ring",
        )
    return plan
