"""Ranks that hold parts of each sequence train as one process does with whole ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from parallel.checks import assert_alike
from parallel.rank_pool import RankPool
from parallel.small_runs import Seen, settings_of, train

DOUBLE, SINGLE = torch.float64, torch.float32
GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "tied": True,
    "bias": True,
    "num_kv_heads": 4,
}
STYLES: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": GPT2}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "CP": (2, 1, {"context": 2}),
    "CP of 4, filled up": (4, 1, {"context": 4}),
    "CPxDP": (4, 2, {"context": 2, "replicate": 2}),
    "CPxFSDP": (4, 2, {"context": 2, "shard": 2}),
    "CPxZeRO-1": (4, 2, {"context": 2, "shard": 2, "shards": "optimizer"}),
    "CPxTP": (4, 1, {"context": 2, "tensor": 2}),
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
        case("CP of 4, filled up", "gpt2", "documents", DOUBLE),
        case("CP of 4, filled up", "gpt2", "gpt", DOUBLE, LATER),
        case("CPxDP", "llama", "gpt", DOUBLE, LATER),
        case("CPxDP", "gpt2", "documents", SINGLE, LATER),
        case("CPxFSDP", "llama", "gpt", DOUBLE),
        case("CPxFSDP", "gpt2", "documents", DOUBLE, LATER),
        case("CPxZeRO-1", "llama", "documents", DOUBLE, LATER),
        case("CPxTP", "gpt2", "gpt", DOUBLE, LATER),
        case("CPxTP", "gpt2", "documents", SINGLE, LATER),
        case("CPxTP+SP", "gpt2", "documents", DOUBLE, LATER),
    ],
)
def test_parts_train_as_whole_sequences(
    ranks: RankPool, name: str, style: str, kind: str, dtype: torch.dtype
) -> None:
    num_ranks, data_ranks, parallel = LAYOUTS[name]
    settings = settings_of(data_ranks, parallel=parallel, **sections())
    found = ranks.run(num_ranks, train_parts, kind, settings, style, dtype)
    assert_alike(found, alone(kind, style, dtype), 1e-10 if dtype is DOUBLE else 1e-5)
