"""A recipe's layout over any number of ranks, without the ranks. Trains nothing, writes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from surefoot.assembly.material import build_model, freeze, open_data, resolve_architecture
from surefoot.config.sections import Recipe
from surefoot.parallel.layout import LayoutRequest
from surefoot.parallel.mesh import MeshSizes, resolve_sizes
from surefoot.parallel.pipeline_schedule import PipelineOrder
from surefoot.parallel.rehearsal import Share, rehearse, sampled_ranks


@dataclass(frozen=True)
class RehearsedLayout:
    """What was built."""

    sizes: MeshSizes
    num_parameters: int
    bubble_fraction: float | None
    """Of a window, in which ranks of the pipeline idle; None without a pipeline."""
    shares: tuple[Share, ...]
    """Of the first and the last rank of each stage."""


def rehearse_layout(recipe: Recipe, num_ranks: int) -> RehearsedLayout:
    """Builds a recipe's layout for the first and the last rank of each stage.

    The data is opened for the sizes that the model takes from it.

    Raises:
        RequestError: the ranks, the mesh and the model do not fit together.
    """
    sizes = resolve_sizes(recipe.parallel, num_ranks)
    data, _ = open_data(recipe)
    architecture = resolve_architecture(recipe, data.sizes)

    def make_model() -> nn.Module:
        model = build_model(architecture)
        freeze(model, recipe.model.frozen)
        return model

    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in make_model().parameters())
    train = recipe.train
    request = LayoutRequest(recipe.parallel, memory=recipe.memory, window=train.accumulation)
    bubble = None
    if sizes.pipeline > 1:
        order = PipelineOrder.of(recipe.parallel, sizes.pipeline)
        bubble = order.bubble_fraction(train.accumulation)
    shares = tuple(
        rehearse(make_model, request, sizes, recipe.optimizer, rank)
        for rank in sampled_ranks(sizes)
    )
    return RehearsedLayout(sizes, num_parameters, bubble, shares)
