"""Tensor parallelism: shards the layers of a model along the tensor axis, with torch's own styles.

Every parameter becomes a DTensor of one mesh, so that one optimizer can step all of them. Results
equal those of the unsharded model up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from surefoot.core.errors import RequestError
from surefoot.core.plans import TensorPlan, TensorStyle, plan_for


class HeldWhole(ParallelStyle):
    """Every rank holds the full layer; its inputs are laid out as `placement` says.

    Args:
        placement: `Replicate()` for the same input on every rank, `Shard(dim)` for parts of it.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def spread(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            first, *rest = inputs
            return (DTensor.from_local(first, mesh, [self._placement], run_check=False), *rest)

        def gather(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        # Parameters without a rule of their own are replicated.
        return distribute_module(
            module,
            device_mesh,
            input_fn=spread,
            output_fn=gather,
        )


class TensorParallel:
    """Gradient sync of a model that is sharded along the tensor axis only."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = tuple(model.parameters())

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self) -> None:
        """Sums the gradients of replicated parameters that see only a part of the sequence."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if (
                isinstance(gradient, DTensor)
                and isinstance(parameter, DTensor)
                and gradient.placements != parameter.placements
            ):
                parameter.grad = gradient.redistribute(placements=parameter.placements)


def parallelize_layers(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    vocabulary_parallel: bool = False,
) -> None:
    """Shards a model in place; names stay.

    Args:
        model: on its device.
        mesh: of the tensor axis.
        sequence_parallel: norms work on parts of the sequence.
        vocabulary_parallel: logits stay sharded over the vocabulary; a rank has those of its words.

    Raises:
        RequestError: no plan knows the model, or the axis does not divide its sizes.
    """
    layers = dict(layers_of(model))
    plan = plan_for(layers)
    if plan is None:
        raise RequestError(
            f"no plan says how a {type(model).__name__} is sharded along the tensor axis",
            where="parallel.tensor",
            rule="plans are known for our GPT and for transformers' Llama, Qwen and Mistral",
            remedy="use parallel.shard, which works for any model",
        )
    if sequence_parallel and not plan.gathered:
        raise RequestError(
            f"a {type(model).__name__} does not support sequence parallelism",
            where="parallel.cut_sequence",
            rule=f"the plan of the {plan.name} family shards layers, not sequences",
            remedy="leave parallel.cut_sequence out",
        )
    check_sizes(model, plan, mesh.size())
    aliases = shared_parameters(model)
    styles = {
        name: style_of(plan.style(name), sequence_parallel, vocabulary_parallel) for name in layers
    }
    if sequence_parallel:
        styles |= {name: gathered_input(count) for name, count in gathering(model, plan)}
    parallelize_module(model, mesh, styles)
    for alias, name in aliases.items():
        owner, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(name))


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers with parameters of their own."""
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            yield name, module


def shared_parameters(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, with the first name of each."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            aliases[name] = known
    return aliases


def style_of(
    style: TensorStyle | None, sequence_parallel: bool, vocabulary_parallel: bool = False
) -> ParallelStyle:
    """The torch style for a plan's style."""
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    match style:
        case TensorStyle.VOCABULARY:
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        case TensorStyle.COLUMNS:
            return ColwiseParallel()
        case TensorStyle.ROWS:
            return RowwiseParallel(output_layouts=between)
        case TensorStyle.LOGITS:
            scores: Placement = Shard(-1) if vocabulary_parallel else Replicate()
            return ColwiseParallel(input_layouts=between, output_layouts=scores)
        case TensorStyle.PER_HEAD:
            return HeldWhole(Shard(2))
        case _:
            if sequence_parallel:
                return SequenceParallel(use_local_output=True)
            return HeldWhole(Replicate())


def gathering(model: nn.Module, plan: TensorPlan) -> Iterator[tuple[str, int]]:
    """Modules that need the full sequence, with their number of inputs."""
    for name, _ in model.named_modules():
        for pattern, num_inputs in plan.gathered.items():
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                yield name, num_inputs


def gathered_input(num_inputs: int) -> ParallelStyle:
    """Gathers the sequence of a module's first input; other inputs are replicated."""
    others = (None,) * (num_inputs - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
    )


def check_sizes(model: nn.Module, plan: TensorPlan, num_ranks: int) -> None:
    """Refuses an axis that does not divide heads, width or vocabulary.

    Raises:
        RequestError: with the numbers and the nearest valid size.
    """
    config: Any = getattr(model, "config", None)
    sizes = {name: getattr(config, name) for name in plan.sizes if hasattr(config, name)}
    broken = [f"{name} = {size}" for name, size in sizes.items() if size % num_ranks]
    if broken:
        fits = [
            n
            for n in range(1, max(sizes.values()) + 1)
            if all(size % n == 0 for size in sizes.values())
        ]
        nearest = min(fits, key=lambda n: (abs(n - num_ranks), n))
        raise RequestError(
            f"parallel.tensor = {num_ranks} does not divide {', '.join(broken)}",
            where="parallel.tensor",
            rule="each rank has the same number of heads, hidden units and vocabulary entries",
            remedy=f"use parallel.tensor={nearest}",
        )
