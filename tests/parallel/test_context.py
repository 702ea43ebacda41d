"""Ranks that hold parts of each sequence train as one process does with whole ones."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel.checks import assert_alike
from parallel.rank_pool import RankPool
from parallel.small_runs import (
    Seen,
    UnevenTexts,
    assembled,
    settings_of,
    small_classifier,
    small_gpt,
    train,
)
from parallel.traffic import Traffic
from surefoot.config.sections.parallel import ParallelSection
from surefoot.core.errors import DataError, RequestError
from surefoot.parallel.context import SequenceParts, checked_plan, shard_sequence
from surefoot.parallel.mesh import MeshSizes
from surefoot.parallel.ring import pass_around
from surefoot.tasks.classification import ClassificationTask
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.losses import shift_labels

DOUBLE, SINGLE = torch.float64, torch.float32
GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "tied": True,
    "bias": True,
    "num_kv_heads": 4,
}
STYLES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "experts": {"experts": {"num_experts": 4, "balance_weight": 0.1}},
}
RING = {"context_exchange": "ring"}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "CP": (2, 1, {"context": 2}),
    "CP of 4, filled up": (4, 1, {"context": 4}),
    "CPxDP": (4, 2, {"context": 2, "replicate": 2}),
    "CPxFSDP": (4, 2, {"context": 2, "shard": 2}),
    "CPxZeRO-1": (4, 2, {"context": 2, "shard": 2, "shards": "optimizer"}),
    "CPxEP": (4, 2, {"context": 2, "expert": 2}),
    "CPxTP": (4, 1, {"context": 2, "tensor": 2}),
    "ring": (2, 1, {"context": 2, **RING}),
    "ring of 4, filled up": (4, 1, {"context": 4, **RING}),
    "ringxFSDP": (4, 2, {"context": 2, "shard": 2, **RING}),
    "ringxTP": (4, 1, {"context": 2, "tensor": 2, **RING}),
    "CPxTP+SP": (4, 1, {"context": 2, "tensor": 2, "cut_sequence": True}),
}


def sections() -> dict[str, Any]:
    return {
        "ema": {"kind": "on", "decay": 0.8},
        "evaluate": {"micro_batch": 4, "weights": "ema"},
        "log": {"weight_norm_every": "1 steps"},
    }


@cache
def alone(kind: str, style: str, dtype: torch.dtype) -> Seen:
    return train(kind, settings_of(**sections()), 20, dtype, **STYLES[style])


def train_parts(kind: str, settings: Any, style: str, dtype: torch.dtype) -> Seen:
    return train(kind, settings, 20, dtype, **STYLES[style])


def case(name: str, style: str, kind: str, dtype: torch.dtype, *marks: Any) -> Any:
    return pytest.param(name, style, kind, dtype, marks=marks)


LATER = pytest.mark.ranks_full


@pytest.mark.parametrize(
    ("name", "style", "kind", "dtype"),
    [
        case("CP", "llama", "documents", DOUBLE),
        case("CP", "gpt2", "gpt", DOUBLE, LATER),
        case("CP", "llama", "gpt", SINGLE, LATER),
        case("CP", "gpt2", "documents", DOUBLE, LATER),
        case("CP of 4, filled up", "gpt2", "documents", DOUBLE, LATER),
        case("CP of 4, filled up", "gpt2", "gpt", DOUBLE, LATER),
        case("CPxDP", "llama", "gpt", DOUBLE, LATER),
        case("CPxDP", "gpt2", "documents", SINGLE, LATER),
        case("CP", "experts", "documents", DOUBLE, LATER),
        case("CPxDP", "experts", "gpt", DOUBLE, LATER),
        case("CPxFSDP", "experts", "gpt", DOUBLE, LATER),
        case("CPxEP", "experts", "documents", DOUBLE, LATER),
        case("CPxFSDP", "llama", "gpt", DOUBLE, LATER),
        case("CPxFSDP", "gpt2", "documents", DOUBLE, LATER),
        case("CPxZeRO-1", "llama", "documents", DOUBLE, LATER),
        case("CPxTP", "gpt2", "gpt", DOUBLE, LATER),
        case("CPxTP", "gpt2", "documents", SINGLE, LATER),
        case("CPxTP+SP", "gpt2", "documents", DOUBLE, LATER),
        case("ring", "llama", "documents", DOUBLE),
        case("ring", "llama", "gpt", DOUBLE, LATER),
        case("ring", "gpt2", "gpt", SINGLE, LATER),
        case("ring", "experts", "documents", DOUBLE, LATER),
        case("ring of 4, filled up", "gpt2", "gpt", DOUBLE, LATER),
        case("ring of 4, filled up", "llama", "documents", DOUBLE, LATER),
        case("ringxFSDP", "gpt2", "documents", DOUBLE, LATER),
        case("ringxTP", "llama", "gpt", DOUBLE, LATER),
    ],
)
def test_parts_train_as_whole_sequences(
    ranks: RankPool, name: str, style: str, kind: str, dtype: torch.dtype
) -> None:
    num_ranks, data_ranks, parallel = LAYOUTS[name]
    settings = settings_of(data_ranks, parallel=parallel, **sections())
    found = ranks.run(num_ranks, train_parts, kind, settings, style, dtype)
    assert_alike(found, alone(kind, style, dtype), 1e-10 if dtype is DOUBLE else 1e-5)


@pytest.mark.ranks_full
@pytest.mark.parametrize(
    "further",
    [
        {"memory": {"recompute": "blocks"}},
        {"memory": {"recompute": "selective"}},
        {"memory": {"offload_activations": "cpu"}},
        {"memory": {"loss": "chunked", "loss_chunk": 3}},
    ],
    ids=["blocks", "selective", "offload", "chunked"],
)
@pytest.mark.parametrize("name", ["CP", "CPxFSDP"])
def test_with_less_memory(ranks: RankPool, name: str, further: dict[str, Any]) -> None:
    num_ranks, data_ranks, parallel = LAYOUTS[name]
    settings = settings_of(data_ranks, parallel=parallel, **sections(), **further)
    found = ranks.run(num_ranks, train_parts, "documents", settings, "llama", DOUBLE)
    assert_alike(found, alone("documents", "llama", DOUBLE), 1e-10)


@pytest.mark.ranks_full
@pytest.mark.parametrize("micro_batch", [3, 5])
@pytest.mark.parametrize("name", ["CP", "CP of 4, filled up", "CPxDP"])
def test_metrics_are_those_of_one_process(ranks: RankPool, name: str, micro_batch: int) -> None:
    num_ranks, data_ranks, parallel = LAYOUTS[name]
    settings = settings_of(data_ranks, parallel=parallel, evaluate={"micro_batch": micro_batch})
    expected = train("documents", settings_of(), 0, **GPT2).metrics
    assert expected["samples"] == 37
    for seen in ranks.run(num_ranks, evaluate_parts, settings):
        assert seen.metrics == pytest.approx(expected, rel=1e-12)


def evaluate_parts(settings: Any) -> Seen:
    return train("documents", settings, 0, **GPT2)


def exchanges() -> list[dict[str, int]]:
    """Collectives of the forward and of the backward of one micro-batch."""
    assembly = assembled("documents", settings_of(parallel={"context": 2}))
    task, model = assembly.evaluator.task, assembly.material.model
    texts = [UnevenTexts(documents=True)[index] for index in range(3)]
    batch = {name: torch.stack([text[name] for text in texts]) for name in texts[0]}
    with Traffic() as forward:
        loss = task.loss_sum(model, batch)
    with Traffic() as backward:
        loss.backward()
    assembly.close()
    return [dict(forward.calls), dict(backward.calls)]


def test_each_layer_exchanges_twice_forward_and_twice_backward(ranks: RankPool) -> None:
    layers = small_gpt().config.num_layers
    for forward, backward in ranks.run(2, exchanges):
        # The ids of documents are gathered once.
        assert forward == {"all_to_all_single": 2 * layers, "allgather_": 1}
        assert backward == {"all_to_all_single": 2 * layers}


def first_draws(settings: Any) -> tuple[int, float]:
    assembly = assembled("gpt", settings, **GPT2)
    rank, drawn = assembly.place.item_rank, float(torch.rand(()))
    assembly.close()
    return rank, drawn


@pytest.mark.ranks_full
def test_parts_draw_dropout_of_their_own(ranks: RankPool) -> None:
    drawn = ranks.run(4, first_draws, settings_of(2, parallel={"context": 2, "replicate": 2}))
    assert [rank for rank, _ in drawn] == [0, 1, 2, 3]
    assert len({value for _, value in drawn}) == 4
    cut = ranks.run(4, first_draws, settings_of(parallel={"context": 2, "tensor": 2}))
    assert [rank for rank, _ in cut] == [0, 0, 1, 1]
    assert len({value for _, value in cut}) == 2


PADDED = {
    "input_ids": torch.arange(20).view(2, 10) % 7,
    "labels": torch.arange(20).view(2, 10) % 7,
    "document_ids": torch.tensor([[0] * 4 + [1] * 6] * 2),
    "lengths": torch.tensor([10, 10]),
}


def test_parts_make_up_the_sequence_and_no_label_is_lost() -> None:
    whole = GenerationTask(7).places(PADDED)
    parts = [SequenceParts(rank, 4, 4, 10).own(whole) for rank in range(4)]
    assert [list(part.expected.shape) for part in parts] == [[2, 3]] * 4
    expected = torch.cat([part.expected for part in parts], dim=1)
    assert torch.equal(expected[:, :10], shift_labels(PADDED["labels"]))
    assert (expected[:, 10:] == -100).all()
    for name in ("input_ids", "document_ids"):
        joined = torch.cat([part.inputs[name] for part in parts], dim=1)
        assert torch.equal(joined[:, :10], PADDED[name])
    positions = torch.cat([part.inputs["position_ids"] for part in parts], dim=1)
    assert positions.tolist() == [[*range(10), 0, 0]] * 2
    assert all(part.inputs["lengths"] is PADDED["lengths"] for part in parts)


def test_what_cannot_be_cut_is_refused() -> None:
    task, parts = GenerationTask(7), SequenceParts(0, 2, 2, 9)
    with pytest.raises(DataError, match="sequences of 10 tokens"):
        parts.own(task.places(PADDED))
    with pytest.raises(DataError, match="10 tokens in 4 parts of a model with experts"):
        SequenceParts(0, 4, 4, 10, may_fill=False).own(task.places(PADDED))
    square = {"input_ids": PADDED["input_ids"], "attention_mask": torch.ones(2, 1, 10, 10)}
    with pytest.raises(DataError, match=r"attention_mask has shape \[2, 1, 10, 10\]"):
        SequenceParts(0, 2, 2, 10)._split_input("attention_mask", square["attention_mask"], (2, 10))


@pytest.mark.parametrize(
    ("heads", "num_parts", "num_tensor", "what", "remedy"),
    [
        ((4, 2), 4, 1, "parallel.context = 4 does not divide num_kv_heads = 2", "context=2"),
        ((4, 4), 3, 1, "does not divide num_heads = 4, num_kv_heads = 4", "context=2"),
        ((4, 4), 4, 2, "context = 4 x parallel.tensor = 2 does not divide", "context=2"),
        ((4, 2), 2, 2, "does not divide num_kv_heads = 2", "context=1"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(
    heads: tuple[int, int], num_parts: int, num_tensor: int, what: str, remedy: str
) -> None:
    model = small_gpt(num_heads=heads[0], num_kv_heads=heads[1])
    sizes = MeshSizes(context=num_parts, tensor=num_tensor)
    assert checked_plan(model, sizes, ParallelSection(context_exchange="ring")).name == "gpt"
    with pytest.raises(RequestError) as refused:
        checked_plan(model, sizes, ParallelSection())
    assert what in str(refused.value)
    assert f"use parallel.{remedy}" in str(refused.value)


def mesh_of(**sizes: int) -> Any:
    return SimpleNamespace(
        sizes=MeshSizes(**sizes), rank=0, device_mesh=SimpleNamespace(device_type="cpu")
    )


def test_other_models_tasks_and_axes_are_refused() -> None:
    section = ParallelSection(context=2)
    with pytest.raises(RequestError, match="no plan says where the attention of"):
        shard_sequence(GenerationTask(24), small_classifier(), mesh_of(context=2), section)
    with pytest.raises(RequestError, match="a ClassificationTask cannot be computed on parts"):
        shard_sequence(ClassificationTask(3), small_gpt(), mesh_of(context=2), section)
    with pytest.raises(RequestError, match=r"parallel.context = 2, and parallel.pipeline"):
        shard_sequence(GenerationTask(24), small_gpt(), mesh_of(context=2, pipeline=2), section)
    dropping = small_gpt(experts={"num_experts": 4, "capacity_factor": 1.0})
    with pytest.raises(RequestError, match="and the experts have a capacity"):
        shard_sequence(GenerationTask(24), dropping, mesh_of(context=2), section)


def test_a_ring_drops_no_weights_of_attention() -> None:
    core = small_gpt(dropout=0.1).blocks[0].attention.core
    with pytest.raises(RequestError, match=r"attention dropout is 0\.1"):
        pass_around(core, SimpleNamespace())  # type: ignore[arg-type]


def test_weights_see_parts_as_further_shards_or_copies() -> None:
    shards = MeshSizes(replicate=2, shard=2, context=3, tensor=2).of_weights
    assert shards == MeshSizes(replicate=2, shard=6, tensor=2)
    assert MeshSizes(replicate=2, context=3).of_weights == MeshSizes(replicate=6)
