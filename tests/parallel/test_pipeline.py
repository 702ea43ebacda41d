"""Models whose layers lie on several ranks train as one process does, by every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.checks import assert_alike
from parallel.rank_pool import RankPool
from parallel.small_runs import (
    VOCABULARY,
    WINDOW,
    Recorder,
    Seen,
    assembled,
    seen_of,
    settings_of,
    small_gpt,
    train,
)
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Material, assemble
from surefoot.config.load import resolve_settings
from surefoot.data.order import Cursor
from surefoot.data.sources.datasets import as_source
from surefoot.parallel.sizes import ParameterSizes
from surefoot.run.run_facts import parameter_sizes
from surefoot.tasks.generation import GenerationTask
from surefoot.tasks.task import FunctionTask

DOUBLE, SINGLE = torch.float64, torch.float32
LLAMA: dict[str, Any] = {"num_layers": 4}
GPT2: dict[str, Any] = {
    "num_layers": 5,
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "bias": True,
    "num_kv_heads": 4,
}
SECTIONS: dict[str, Any] = {
    "ema": {"kind": "on", "decay": 0.8},
    "evaluate": {"micro_batch": 4, "weights": "ema"},
    "log": {"weight_norm_every": "1 steps"},
}
ZERO_BUBBLE = {"pipeline_schedule": "zero-bubble"}
full = pytest.mark.ranks_full


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@cache
def alone(dtype: torch.dtype = DOUBLE, is_gpt2: bool = False, **sections: Any) -> Seen:
    return train("gpt", settings_of(**SECTIONS), 20, dtype, **(GPT2 if is_gpt2 else LLAMA))


def staged(
    parallel: dict[str, Any], data_ranks: int = 1, accumulation: int = 3, **sections: Any
) -> dict[str, Any]:
    """The windows of `alone` over stages."""
    settings = settings_of(data_ranks, parallel=parallel, **SECTIONS, **sections)
    micro_batch = WINDOW // accumulation // data_ranks
    settings["train"] |= {"accumulation": accumulation, "micro_batch": micro_batch}
    return settings


def train_staged(settings: Any, dtype: torch.dtype = DOUBLE, is_gpt2: bool = False) -> Seen:
    return train("gpt", settings, 20, dtype, **(GPT2 if is_gpt2 else LLAMA))


def all_layers(found: list[Seen]) -> list[Seen]:
    """What was seen, each with the weights of all ranks; what several hold is the same."""
    weights: dict[str, Tensor] = {}
    for seen in found:
        for name, weight in seen.weights.items():
            assert torch.equal(weights.setdefault(name, weight), weight), name
    assert all(len(seen.weights) < len(weights) for seen in found)
    for seen in found:
        seen.weights = weights
    return found


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline_schedule": "gpipe"},
    "1f1b": {"pipeline_schedule": "1f1b"},
    "interleaved": {"pipeline_schedule": "interleaved"},
    "zero-bubble": ZERO_BUBBLE,
    "zero-bubble, two stages": {**ZERO_BUBBLE, "stages_per_rank": 2},
}


@pytest.mark.parametrize(
    ("name", "is_gpt2"),
    [
        *((name, False) for name in ("1f1b", "interleaved", "zero-bubble")),
        *(pytest.param(name, False, marks=full) for name in ("gpipe", "zero-bubble, two stages")),
        *(pytest.param(name, True, marks=full) for name in SCHEDULES),
    ],
)
def test_stages_train_as_one_process(ranks: RankPool, name: str, is_gpt2: bool) -> None:
    settings = staged({"pipeline": 2, **SCHEDULES[name]})
    found = ranks.run(2, train_staged, settings, DOUBLE, is_gpt2)
    assert_alike(all_layers(found), alone(is_gpt2=is_gpt2), 1e-10)


@full
@pytest.mark.parametrize("name", SCHEDULES)
def test_in_float32(ranks: RankPool, name: str) -> None:
    settings = staged({"pipeline": 2, **SCHEDULES[name]})
    found = ranks.run(2, train_staged, settings, SINGLE)
    assert_alike(all_layers(found), alone(SINGLE), 1e-5)


LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "4 stages, gpipe": (4, 1, 3, {"pipeline": 4, "pipeline_schedule": "gpipe"}),
    "4 stages, 1f1b": (4, 1, 4, {"pipeline": 4}),
    "4 stages, zero-bubble": (4, 1, 4, {"pipeline": 4, **ZERO_BUBBLE}),
    "4 stages, zero-bubble, 3 micro-batches": (4, 1, 3, {"pipeline": 4, **ZERO_BUBBLE}),
    "PPxDP, gpipe": (4, 2, 3, {"pipeline": 2, "pipeline_schedule": "gpipe"}),
    "PPxDP, 1f1b": (4, 2, 3, {"pipeline": 2}),
    "PPxDP, interleaved": (4, 2, 3, {"pipeline": 2, "pipeline_schedule": "interleaved"}),
    "PPxDP, zero-bubble": (4, 2, 3, {"pipeline": 2, **ZERO_BUBBLE}),
    "PPxZeRO-1, 1f1b": (4, 2, 3, {"pipeline": 2, "shard": 2, "shards": "optimizer"}),
    "PPxZeRO-2, 1f1b": (4, 2, 3, {"pipeline": 2, "shard": 2, "shards": "gradients"}),
    "PPxZeRO-3, 1f1b": (4, 2, 3, {"pipeline": 2, "shard": 2}),
    "PPxZeRO-3, reduced once": (4, 2, 3, {"pipeline": 2, "shard": 2, "reduce": "window"}),
    "PPxZeRO-2, gpipe": (
        *(4, 2, 3),
        {"pipeline": 2, "shard": 2, "shards": "gradients", "pipeline_schedule": "gpipe"},
    ),
    "PPxZeRO-3, gpipe": (4, 2, 3, {"pipeline": 2, "shard": 2, "pipeline_schedule": "gpipe"}),
    "PPxZeRO-2, interleaved": (
        *(4, 2, 3),
        {"pipeline": 2, "shard": 2, "shards": "gradients", "pipeline_schedule": "interleaved"},
    ),
    "PPxZeRO-3, interleaved": (
        *(4, 2, 3),
        {"pipeline": 2, "shard": 2, "pipeline_schedule": "interleaved"},
    ),
    "PPxZeRO-1, zero-bubble": (
        *(4, 2, 3),
        {"pipeline": 2, "shard": 2, "shards": "optimizer", **ZERO_BUBBLE},
    ),
    "PPxZeRO-1, zero-bubble, two stages": (
        *(4, 2, 3),
        {"pipeline": 2, "shard": 2, "shards": "optimizer", **ZERO_BUBBLE, "stages_per_rank": 2},
    ),
    "TPxPP, gpipe": (4, 1, 3, {"pipeline": 2, "tensor": 2, "pipeline_schedule": "gpipe"}),
    "TPxPP, 1f1b": (4, 1, 3, {"pipeline": 2, "tensor": 2}),
    "TP+SPxPP, 1f1b": (4, 1, 3, {"pipeline": 2, "tensor": 2, "cut_sequence": True}),
    "TP+SPxPP, interleaved": (
        *(4, 1, 3),
        {"pipeline": 2, "tensor": 2, "cut_sequence": True, "pipeline_schedule": "interleaved"},
    ),
    "TPxPP, zero-bubble": (4, 1, 3, {"pipeline": 2, "tensor": 2, **ZERO_BUBBLE}),
}


@full
@pytest.mark.parametrize("name", LAYOUTS)
def test_products_train_as_one_process(ranks: RankPool, name: str) -> None:
    num_ranks, data_ranks, accumulation, parallel = LAYOUTS[name]
    settings = staged(parallel, data_ranks, accumulation)
    found = ranks.run(num_ranks, train_staged, settings)
    assert_alike(all_layers(found), alone(), 1e-10)


EIGHT: dict[str, dict[str, Any]] = {
    "TPxPPxZeRO-3": {"tensor": 2, "pipeline": 2, "shard": 2},
    "TPxPPxZeRO-2": {"tensor": 2, "pipeline": 2, "shard": 2, "shards": "gradients"},
    "TP+SPxPPxZeRO-1": {
        **{"tensor": 2, "pipeline": 2, "shard": 2, "shards": "optimizer", "cut_sequence": True},
    },
    "TPxPPxDP": {"tensor": 2, "pipeline": 2, "replicate": 2},
    "PPxHSDP": {"pipeline": 2, "replicate": 2, "shard": 2},
    "TPxPPxZeRO-1, zero-bubble": {
        **{"tensor": 2, "pipeline": 2, "shard": 2, "shards": "optimizer"},
        **ZERO_BUBBLE,
    },
}


@full
@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks_train_as_one_process(eight_ranks: RankPool, name: str) -> None:
    data_ranks = 4 if "HSDP" in name else 2
    settings = staged(EIGHT[name], data_ranks, 3)
    found = eight_ranks.run(8, train_staged, settings)
    assert_alike(all_layers(found), alone(), 1e-10)


class UnevenLengths(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Texts of 3 to 10 tokens, or all of 10."""

    def __init__(self, are_uneven: bool) -> None:
        self._are_uneven = are_uneven

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 3 + index * 5 % 8 if self._are_uneven else 10
        return {"input_ids": torch.randint(VOCABULARY, (length,), generator=generator)}


def two_terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """A loss of two terms, the second of each text's first half."""
    ids = batch["input_ids"]
    scores = model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return {"all": -scores.sum(), "first": -0.1 * scores[:, : ids.shape[1] // 2].sum()}


def train_uneven(parallel: dict[str, Any], kind: str) -> Seen:
    """Micro-batches of one text each, and the weights of two terms of the loss."""
    section = resolve_settings(
        {
            **settings_of(parallel=parallel, **SECTIONS),
            "train": {"horizon": "8 steps", "micro_batch": 1, "accumulation": 4},
            "evaluate": {"micro_batch": 1},
        }
    ).config
    process = prepare_process(section)
    task: Any = GenerationTask(VOCABULARY)
    if kind == "two terms":
        task = FunctionTask(
            two_terms,
            lambda batch: {
                "all": float(batch["input_ids"].shape[1] - 1),
                "first": float(batch["input_ids"].shape[1]),
            },
        )
    source = as_source(UnevenLengths(kind == "lengths"), "training data")
    model = small_gpt(num_layers=4).double()
    assembly = assemble(Material(model, task, source, {"validation": source}), section, process)
    recorder = Recorder()
    update = assembly.make_update((recorder,))
    with closing(assembly.open_windows(Cursor())) as windows:
        for _ in range(8):
            update(next(windows))
        update.parts.log.settle()
    (report,) = assembly.evaluator.run(8)
    assembly.close()
    return seen_of(recorder.reports, model, dict(report.metrics))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("1f1b", "lengths"),
        pytest.param("interleaved", "two terms", marks=full),
        pytest.param("zero-bubble", "two terms", marks=full),
        pytest.param("gpipe", "two terms", marks=full),
    ],
)
def test_micro_batches_of_one_text(ranks: RankPool, name: str, kind: str) -> None:
    found = ranks.run(2, train_uneven, {"pipeline": 2, **SCHEDULES[name]}, kind)
    assert_alike(all_layers(found), train_uneven({}, kind), 1e-10)


@full
@pytest.mark.parametrize("extent", ["blocks", "selective", "budget"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_with_recompute(ranks: RankPool, name: str, extent: str) -> None:
    settings = staged({"pipeline": 2, **SCHEDULES[name]}, memory={"recompute": extent})
    assert_alike(all_layers(ranks.run(2, train_staged, settings)), alone(), 1e-10)


@full
def test_one_layer_a_stage_is_computed_again(ranks: RankPool) -> None:
    settings = staged({"pipeline": 4}, 1, 4, memory={"recompute": "blocks"})
    assert_alike(all_layers(ranks.run(4, train_staged, settings)), alone(), 1e-10)


@full
@pytest.mark.parametrize("name", ["1f1b", "zero-bubble, two stages"])
@pytest.mark.parametrize(
    ("memory", "parallel"),
    [
        ({"loss": "chunked", "loss_chunk": 7}, {}),
        ({"offload_activations": "cpu"}, {}),
        ({}, {"tensor": 2, "cut_logits": True}),
    ],
)
def test_ways_to_less_memory(
    ranks: RankPool, name: str, memory: dict[str, Any], parallel: dict[str, Any]
) -> None:
    settings = staged({"pipeline": 2, **SCHEDULES[name], **parallel}, memory=memory)
    found = ranks.run(4 if parallel else 2, train_staged, settings)
    assert_alike(all_layers(found), alone(), 1e-10)


@full
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe"])
def test_compiled_blocks(ranks: RankPool, name: str) -> None:
    settings = staged({"pipeline": 2, **SCHEDULES[name]})
    settings["train"]["compile"] = "blocks"
    assert_alike(all_layers(ranks.run(2, train_staged, settings)), alone(), 1e-10)


@full
@pytest.mark.parametrize("parallel", [{}, {"shard": 2}, {"shard": 2, "gather": "as-computed"}])
def test_in_bfloat16(ranks: RankPool, parallel: dict[str, Any]) -> None:
    num_data = parallel.get("shard", 1)
    bf16: dict[str, Any] = {"precision": {"dtype": "bf16"}}
    settings = staged({"pipeline": 2, **parallel}, num_data, **bf16)
    found = ranks.run(2 * num_data, train_staged, settings, SINGLE)
    same = settings_of(num_data, parallel=parallel, **SECTIONS, **bf16)
    expected = ranks.run(num_data, train_staged, same, SINGLE)
    assert found[0].losses == pytest.approx(expected[0].losses, rel=1e-3)


def train_grouped(parallel: dict[str, Any]) -> Seen:
    settings = staged(parallel)
    settings["optimizer"]["groups"] = [
        {"pattern": "blocks.0.*", "lr_multiplier": 0.5, "weight_decay": 0.0},
        {"pattern": "head.*", "lr_multiplier": 2.0},
    ]
    return train("gpt", settings, 5, DOUBLE, **LLAMA)


@full
def test_groups_of_other_stages_are_no_mistake(ranks: RankPool) -> None:
    found = ranks.run(2, train_grouped, {"pipeline": 2})
    assert_alike(all_layers(found), train_grouped({}), 1e-10)


def poison(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * float("nan")


def first_bad(parallel: dict[str, Any], block: str) -> Any:
    """Where a window is no longer finite whose `block` gives NaN."""
    trainable = (assembly := assembled("gpt", staged(parallel), **LLAMA)).trainable
    blocks = assembly.material.model.get_submodule("blocks")
    if block in dict(blocks.named_children()):
        blocks.get_submodule(block).register_forward_hook(poison)
    with closing(assembly.open_windows(Cursor())) as windows:
        window = next(windows)
    denominators = trainable.passing.ranks.sum_over_ranks(window.weights)
    found: Any = trainable.first_bad.find(window, denominators)
    assembly.close()
    return found["forward"]["module"], found["backward"]["module"], found["gradients"]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=full)])
def test_what_is_not_finite_is_found_on_whichever_stage(ranks: RankPool, schedule: str) -> None:
    parallel = {"pipeline": 2, "pipeline_schedule": schedule}
    expected = first_bad({}, "2")
    for found in ranks.run(2, first_bad, parallel, "2"):
        assert found[:2] == expected[:2]
        assert sorted(found[2]) == sorted(expected[2])


def test_the_whole_model_is_counted(ranks: RankPool) -> None:
    assert ranks.run(2, count, {"pipeline": 2}) == [count({})] * 2


def count(parallel: dict[str, Any]) -> ParameterSizes:
    assembly = assembled("gpt", staged(parallel), **LLAMA)
    assembly.close()
    return parameter_sizes(assembly)


def random_rank(parallel: dict[str, Any]) -> int:
    assembly = assembled("gpt", staged(parallel), **LLAMA)
    assembly.close()
    return assembly.place.random_rank


@full
def test_stages_and_replicas_draw_numbers_of_their_own(ranks: RankPool) -> None:
    assert ranks.run(4, random_rank, {"pipeline": 2, "replicate": 2}) == [0, 1, 2, 3]
    assert ranks.run(4, random_rank, {"pipeline": 2, "tensor": 2}) == [0, 0, 1, 1]
