"""Experts spread over ranks train as one process does, alone and with shards or copies."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallel.checks import assert_alike
from parallel.rank_pool import CaseFailed, RankPool
from parallel.small_runs import Seen, assembled, settings_of, train
from surefoot.core.errors import RequestError
from surefoot.models.moe import routed_layers
from surefoot.parallel.parts import local_part

DOUBLE, SINGLE = torch.float64, torch.float32
LOSS: dict[str, Any] = {"num_experts": 4, "shared_experts": 1, "balance_weight": 0.1}
BIAS: dict[str, Any] = {"num_experts": 4, "balance": "bias", "bias_rate": 0.01, "scores": "sigmoid"}
SIX: dict[str, Any] = {"num_experts": 6, "every": 2, "experts_per_token": 3}
SECTIONS: dict[str, Any] = {
    "ema": {"kind": "on", "decay": 0.8},
    "evaluate": {"micro_batch": 4, "weights": "ema"},
    "log": {"weight_norm_every": "1 steps"},
}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "EP": (2, 2, {"expert": 2}),
    "EP of 4": (4, 4, {"expert": 4}),
    "EPxDP": (4, 4, {"expert": 2, "replicate": 2}),
    "EPxZeRO-1": (4, 4, {"expert": 2, "shard": 2, "shards": "optimizer"}),
    "EPxZeRO-2": (4, 4, {"expert": 2, "shard": 2, "shards": "gradients"}),
    "EPxZeRO-3": (4, 4, {"expert": 2, "shard": 2}),
    "EPxCP": (4, 2, {"expert": 2, "context": 2}),
    "DDP": (4, 4, {}),
    "ZeRO-3": (4, 4, {"shard": 4}),
}
SHORT = 5
"""Updates: the fourth is a window of one sample."""


def routed(settings: Any, num_updates: int, dtype: torch.dtype, experts: Any) -> Seen:
    return train("gpt", settings, num_updates, dtype, experts=experts)


@cache
def alone(kind: str, num_updates: int, dtype: torch.dtype = DOUBLE) -> Seen:
    experts = {"loss": LOSS, "bias": BIAS, "six": SIX}[kind]
    return routed(settings_of(**SECTIONS), num_updates, dtype, experts)


def laid_out(name: str, **sections: Any) -> tuple[int, dict[str, Any]]:
    num_ranks, data_ranks, parallel = LAYOUTS[name]
    return num_ranks, settings_of(data_ranks, parallel=parallel, **SECTIONS, **sections)


def test_spread_experts_train_as_one_process(ranks: RankPool) -> None:
    num_ranks, settings = laid_out("EPxZeRO-3")
    found = ranks.run(num_ranks, routed, settings, SHORT, DOUBLE, LOSS)
    assert_alike(found, alone("loss", SHORT), 1e-10)


@pytest.mark.ranks_full
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("kind", "experts"), [("loss", LOSS), ("bias", BIAS)])
def test_every_layout_trains_as_one_process(
    ranks: RankPool, name: str, kind: str, experts: dict[str, Any]
) -> None:
    num_ranks, settings = laid_out(name)
    found = ranks.run(num_ranks, routed, settings, 20, DOUBLE, experts)
    assert_alike(found, alone(kind, 20), 1e-10)


@pytest.mark.ranks_full
@pytest.mark.parametrize("name", ["EP", "EP of 4", "EPxZeRO-3"])
def test_in_float32(ranks: RankPool, name: str) -> None:
    num_ranks, settings = laid_out(name)
    found = ranks.run(num_ranks, routed, settings, 20, SINGLE, LOSS)
    assert_alike(found, alone("loss", 20, SINGLE), 1e-5)


@pytest.mark.ranks_full
def test_three_experts_a_rank_in_every_second_layer(ranks: RankPool) -> None:
    """Two shards cannot halve three experts: another dim of their weights is cut."""
    num_ranks, settings = laid_out("EPxZeRO-3")
    found = ranks.run(num_ranks, routed, settings, 20, DOUBLE, SIX)
    assert_alike(found, alone("six", 20), 1e-10)


@pytest.mark.ranks_full
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_an_optimizer_steps_weights_of_two_meshes_together(ranks: RankPool, kind: str) -> None:
    own: dict[str, Any] = {"kind": "sgd", "lr": 3e-2, "momentum": 0.9}
    optimizer = own if kind == "sgd" else {"kind": "adam", "lr": 3e-3}
    num_ranks, settings = laid_out("EPxZeRO-3", optimizer=optimizer)
    expected = routed(settings_of(optimizer=optimizer, **SECTIONS), 20, DOUBLE, LOSS)
    found = ranks.run(num_ranks, routed, settings, 20, DOUBLE, LOSS)
    assert_alike(found, expected, 1e-10)


@pytest.mark.ranks_full
@pytest.mark.parametrize("extent", ["blocks", "selective", "budget"])
def test_with_recompute(ranks: RankPool, extent: str) -> None:
    num_ranks, settings = laid_out("EPxZeRO-3", memory={"recompute": extent})
    found = ranks.run(num_ranks, routed, settings, 20, DOUBLE, LOSS)
    assert_alike(found, alone("loss", 20), 1e-10)


@pytest.mark.ranks_full
def test_the_balance_of_another_number_of_tokens_together_is_another_loss(ranks: RankPool) -> None:
    """As declared: half the micro-batch on the same ranks balances over half the tokens."""
    settings = settings_of(2, parallel={"expert": 2}, **SECTIONS)
    settings["train"] |= {"micro_batch": 1, "accumulation": 6}
    found = ranks.run(2, routed, settings, 1, DOUBLE, LOSS)[0].terms[0]
    expected = alone("loss", 20).terms[0]
    assert found["router_z"] == pytest.approx(expected["router_z"], rel=1e-12)
    assert abs(found["balance"] / expected["balance"] - 1) > 1e-4


@pytest.mark.ranks_full
def test_spread_experts_drop_what_copies_drop(ranks: RankPool) -> None:
    """A capacity is that of each rank's tokens, wherever the experts are."""
    experts = {"num_experts": 4, "capacity_factor": 0.8}
    copies, spread = (
        ranks.run(2, routed, settings_of(2, parallel=parallel, **SECTIONS), 20, DOUBLE, experts)
        for parallel in ({}, {"expert": 2})
    )
    assert copies[0].metrics["dropped_tokens"] > 0.05
    assert_alike(spread, copies[0], 1e-10)


def held(settings: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of what this rank holds of a routed layer, and of the norm before it."""
    assembly = assembled("gpt", settings, experts=LOSS)
    model = assembly.trainable.state.model
    assembly.close()
    wanted = ("feedforward.experts.input", "feedforward.shared.input.weight")
    shapes = {}
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.1.") and name.endswith(wanted):
            assert isinstance(parameter, DTensor)
            shapes[name.removeprefix("blocks.1.feedforward.")] = tuple(local_part(parameter).shape)
    assert all(hasattr(layer.exchange, "_group") for layer in routed_layers(model).values())
    return shapes


def test_each_rank_holds_its_experts(ranks: RankPool) -> None:
    for parallel, first, shared in (
        ({"expert": 2}, 2, 24),
        ({"expert": 2, "shard": 2}, 1, 12),
    ):
        num_ranks = 4 if "shard" in parallel else 2
        found = ranks.run(num_ranks, held, settings_of(num_ranks, parallel=parallel))
        expected = {"experts.input": (first, 16, 24), "shared.input.weight": (shared, 16)}
        assert found == [expected] * num_ranks


@pytest.mark.parametrize(
    ("experts", "parallel", "told", "remedy"),
    [
        (
            "none",
            {"expert": 2},
            "parallel.expert is 2, and the GPT has no experts",
            "use parallel.shard=2 instead",
        ),
        (
            {"num_experts": 3},
            {"expert": 2},
            "parallel.expert = 2 does not divide the 3 experts of blocks.0.feedforward",
            "use parallel.expert=1",
        ),
        (LOSS, {"tensor": 2}, "parallel.tensor is 2, and the model has 2 routed layers", ""),
        (LOSS, {"pipeline": 2}, "parallel.pipeline is 2, and the model has 2 routed layers", ""),
    ],
)
def test_what_cannot_be_spread_is_refused(
    ranks: RankPool, experts: Any, parallel: dict[str, int], told: str, remedy: str
) -> None:
    with pytest.raises(CaseFailed) as failed:
        ranks.run(2, routed, settings_of(1, parallel=parallel), 1, DOUBLE, experts)
    error = failed.value.error
    assert isinstance(error, RequestError)
    assert told in str(error) and remedy in str(error)
