"""How a task is computed where its model is laid out: in parts, in chunks, with routers.

The meaning of the loss stays; every way adds up to it. Nothing here touches the model.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import nn

from surefoot.config.sections import Settings
from surefoot.core.errors import RequestError
from surefoot.core.identity import identity
from surefoot.models.routers import SumOverRanks, routers_of
from surefoot.parallel.context import shard_sequence
from surefoot.parallel.mesh import ONE_RANK, Mesh
from surefoot.parallel.vocabulary import VocabularyParallelScores
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.losses import sequence_cross_entropy_sum
from surefoot.tasks.routed import RouterLoads, RouterTask
from surefoot.tasks.scoring import ChunkedScores, WholeScores, takes_finish
from surefoot.tasks.task import Task, Weight
from surefoot.tasks.wrapper import TaskWrapper


def place_task(task: Task, model: nn.Module, settings: Settings, mesh: Mesh | None) -> Task:
    """The task as the ranks of this mesh compute it; None for one rank.

    Raises:
        RequestError: the task or the model cannot be computed so.
    """
    scored = _scored(task, model, settings, mesh)
    sharded = shard_sequence(scored, model, mesh, settings.parallel)
    return with_routers(sharded, model, identity if mesh is None else mesh.sum_over_items)


def with_routers(task: Task, model: nn.Module, sum_over_ranks: SumOverRanks) -> Task:
    """The task, with the terms of the routers where the model has any."""
    routers = routers_of(model, sum_over_ranks)
    return task if routers is None else RouterTask(task, routers)


def weight_of(task: Task, trained: Task) -> Callable[[Any], Weight]:
    """How batches of `task` are weighed where what is trained is `trained`."""
    return trained.weight_of(task) if isinstance(trained, RouterTask) else task.weight


def loads_of(task: Task) -> RouterLoads | None:
    """The loads of a task with routers; None for any other."""
    return task.routers.loads if isinstance(task, RouterTask) else None


def _scored(task: Task, model: nn.Module, settings: Settings, mesh: Mesh | None) -> Task:
    chunked = settings.memory.loss == "chunked"
    sizes = ONE_RANK if mesh is None else mesh.sizes
    if mesh is not None and settings.parallel.cut_logits and sizes.tensor > 1:
        generation = _next_token(task, "parallel.cut_logits", "false")
        if chunked:
            raise _refused_chunks(
                "parallel.cut_logits is true",
                "each rank has the scores of its own words already",
                "use memory.loss=whole",
            )
        return generation.scored_by(VocabularyParallelScores(mesh.group("tensor")))
    if not chunked:
        return task if settings.train.compile == "off" else with_compiled_loss(task)
    generation = _next_token(task, "memory.loss", "whole")
    if not takes_finish(model):
        raise _refused_chunks(
            f"the forward of a {type(model).__name__} has no parameter `finish`",
            "the model calls `finish(hidden, output_layer)` in the place of its output layer",
            "use memory.loss=whole, or our GPT",
        )
    if sizes.tensor > 1:
        raise _refused_chunks(
            f"parallel.tensor is {sizes.tensor}",
            "an output layer that is cut computes all places at once",
            "use parallel.cut_logits=true with memory.loss=whole",
        )
    if settings.train.compile == "whole":
        raise _refused_chunks(
            "train.compile is whole",
            "chunks are computed again in the backward, one by one",
            "use train.compile=blocks",
        )
    return generation.scored_by(ChunkedScores(settings.memory.loss_chunk))


def with_compiled_loss(task: Task) -> Task:
    """The task, of which a next-token loss is compiled, so that it makes no float32 scores."""
    if isinstance(task, TaskWrapper):
        wrapper = copy(task)
        wrapper.task = with_compiled_loss(task.task)
        return wrapper
    if isinstance(task, GenerationTask) and isinstance(task.scoring, WholeScores):
        compiled = torch.compile(sequence_cross_entropy_sum)
        return task.scored_by(WholeScores(task.vocabulary_size, compiled))
    return task


def _next_token(task: Task, where: str, off: str) -> GenerationTask:
    if isinstance(task, GenerationTask):
        return task
    raise RequestError(
        f"{where} is set, and the task is a {type(task).__name__}",
        where=where,
        rule="it is a way to compute next-token prediction (GenerationTask), without further "
        "metrics",
        remedy=f"use {where}={off}",
    )


def _refused_chunks(what: str, rule: str, remedy: str) -> RequestError:
    return RequestError(
        f"memory.loss is chunked, and {what}", where="memory.loss", rule=rule, remedy=remedy
    )
