"""What a pipeline does not take is refused before the first update, with what works instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parallel.rank_pool import CaseFailed, RankPool
from parallel.small_runs import assembled, settings_of
from surefoot.core.errors import RequestError

INTERLEAVED = {"pipeline_schedule": "interleaved"}
ZERO_BUBBLE = {"pipeline_schedule": "zero-bubble"}


def assemble_gpt(
    parallel: dict[str, Any], train: dict[str, Any] | None = None, **model: Any
) -> None:
    train = dict(train or {})
    settings = settings_of(parallel=parallel, memory={"recompute": train.pop("recompute", "none")})
    settings["train"] |= train
    assembled("gpt", settings, **{"num_layers": 4, **model})


def assemble_classifier(parallel: dict[str, Any]) -> None:
    assembled("classifier", settings_of(parallel=parallel))


def said(ranks: RankPool, num_ranks: int, case: Callable[..., None], *arguments: Any) -> str:
    """What the error says, of whichever rank fails first."""
    with pytest.raises(CaseFailed) as failed:
        ranks.run(num_ranks, case, *arguments)
    assert isinstance(failed.value.error, RequestError), failed.value
    return str(failed.value.error)


def with_model(parallel: dict[str, Any], model: dict[str, Any]) -> None:
    assemble_gpt(parallel, **model)


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "layers": ({"pipeline": 2}, {"num_layers": 1}, "1 layers for 2 stages", "parallel.pipeline=1"),
    "layers of several stages a rank": (
        *({"pipeline": 2, **INTERLEAVED}, {"num_layers": 3}),
        *("3 layers for 4 stages (2 ranks of 2)", "or fewer stages on each rank"),
    ),
    "tied": (
        *({"pipeline": 2}, {"tied": True}),
        *("head.weight is token_embedding.weight", "use model.tied=false"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_cut(ranks: RankPool, name: str) -> None:
    parallel, model, what, remedy = MODELS[name]
    error = said(ranks, 2, with_model, parallel, model)
    assert what in error
    assert remedy in error


OPTIONS: dict[str, tuple[int, dict[str, Any], dict[str, Any], str, str]] = {
    "windows shorter than the pipeline": (
        *(4, {"pipeline": 4}, {}),
        *("a window of 3 micro-batches, and the schedule is 1f1b", "train.accumulation=4"),
    ),
    "uneven rounds": (
        *(2, {"pipeline": 2, **INTERLEAVED}, {"accumulation": 5}),
        *("a window of 5 micro-batches, and the schedule is interleaved", "accumulation=6"),
    ),
    "stages a rank": (
        *(2, {"pipeline": 2, "stages_per_rank": 2}, {}),
        *("1f1b has one stage per rank", "pipeline_schedule=interleaved"),
    ),
    "compiled whole": (
        *(2, {"pipeline": 2}, {"compile": "whole"}),
        *("train.compile is whole", "use train.compile=blocks"),
    ),
    "compiled blocks of a split backward": (
        *(2, {"pipeline": 2, **ZERO_BUBBLE}, {"compile": "blocks"}),
        *("train.compile is blocks", "pipeline_schedule=1f1b"),
    ),
    "activations of a split backward": (
        *(2, {"pipeline": 2, **ZERO_BUBBLE}, {"recompute": "blocks"}),
        *("memory.recompute is blocks", "use parallel.pipeline_schedule=1f1b"),
    ),
    "shards of a split backward": (
        *(4, {"pipeline": 2, "shard": 2, **ZERO_BUBBLE}, {}),
        *("parallel.shards is parameters", "use parallel.shards=optimizer"),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_do_not_go_together(ranks: RankPool, name: str) -> None:
    num_ranks, parallel, train, what, remedy = OPTIONS[name]
    error = said(ranks, num_ranks, assemble_gpt, parallel, train)
    assert what in error
    assert remedy in error


def test_a_model_without_a_plan(ranks: RankPool) -> None:
    error = said(ranks, 2, assemble_classifier, {"pipeline": 2})
    assert "no plan says how a Sequential is split into stages" in error
    assert "use parallel.shard" in error
