"""Models whose layers are cut train as one process does, alone and with shards or copies."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from parallel.checks import assert_alike
from parallel.rank_pool import CaseFailed, RankPool
from parallel.small_runs import Seen, settings_of, train
from surefoot.core.errors import RequestError

DOUBLE = torch.float64
LLAMA: dict[str, Any] = {}
GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "tied": True,
    "bias": True,
    "num_kv_heads": 4,
}


@cache
def alone(is_gpt2: bool) -> Seen:
    return train("gpt", settings_of(**sections()), 20, DOUBLE, **style(is_gpt2))


def style(is_gpt2: bool) -> dict[str, Any]:
    return GPT2 if is_gpt2 else LLAMA


def sections() -> dict[str, Any]:
    return {
        "ema": {"kind": "on", "decay": 0.8},
        "evaluate": {"micro_batch": 4, "weights": "ema"},
        "log": {"weight_norm_every": "1 steps"},
    }


def train_cut(settings: Any, is_gpt2: bool) -> Seen:
    return train("gpt", settings, 20, DOUBLE, **style(is_gpt2))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP": (2, {"tensor": 2}),
    "TP+SP": (2, {"tensor": 2, "cut_sequence": True}),
    "TPxFSDP": (4, {"tensor": 2, "shard": 2}),
    "TP+SPxFSDP": (4, {"tensor": 2, "shard": 2, "cut_sequence": True, "shards": "optimizer"}),
    "TPxDP": (4, {"tensor": 2, "replicate": 2}),
}


def kept_for_later(name: str, is_gpt2: bool) -> Any:
    """One style of model for each layout in every run of the tests, the other on demand."""
    later = is_gpt2 == (name in ("TP+SP", "TPxFSDP"))
    return pytest.param(name, is_gpt2, marks=[pytest.mark.ranks_full] if later else [])


@pytest.mark.parametrize(
    ("name", "is_gpt2"), [kept_for_later(n, g) for n in LAYOUTS for g in (False, True)]
)
def test_cut_layers_train_as_one_process(ranks: RankPool, name: str, is_gpt2: bool) -> None:
    num_ranks, parallel = LAYOUTS[name]
    settings = settings_of(num_ranks // 2, parallel=parallel, **sections())
    found = ranks.run(num_ranks, train_cut, settings, is_gpt2)
    assert_alike(found, alone(is_gpt2), 1e-10)


def test_an_axis_that_divides_no_heads_is_refused(ranks: RankPool) -> None:
    settings = settings_of(parallel={"tensor": 4})
    with pytest.raises(CaseFailed) as failed:
        ranks.run(4, train_cut, settings, False)
    error = failed.value.error
    assert isinstance(error, RequestError)
    assert "parallel.tensor = 4 does not divide num_kv_heads = 2" in str(error)
    assert "use parallel.tensor=2" in str(error)


def test_what_a_cut_layer_keeps_does_not_go_to_the_host(ranks: RankPool) -> None:
    settings = settings_of(parallel={"tensor": 2}, memory={"offload_activations": "cpu"})
    with pytest.raises(CaseFailed) as failed:
        ranks.run(2, train_cut, settings, False)
    assert isinstance(failed.value.error, RequestError)
    assert "offload_activations is cpu, and parallel.tensor is 2" in str(failed.value.error)


@pytest.mark.ranks_full
@pytest.mark.parametrize("extent", ["selective", "budget"])
def test_with_recompute(ranks: RankPool, extent: str) -> None:
    parallel = {"tensor": 2, "shard": 2, "cut_sequence": True}
    settings = settings_of(2, parallel=parallel, memory={"recompute": extent}, **sections())
    assert_alike(ranks.run(4, train_cut, settings, False), alone(False), 1e-10)
