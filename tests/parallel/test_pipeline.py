"""Models whose layers lie on several ranks train as one process does, by every schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from parallel.checks import assert_alike
from parallel.rank_pool import RankPool
from parallel.small_runs import Seen, settings_of, train

DOUBLE, SINGLE = torch.float64, torch.float32
FOUR: dict[str, Any] = {"num_layers": 4}


@cache
def alone(dtype: torch.dtype = DOUBLE) -> Seen:
    return train("gpt", settings_of(**sections()), 20, dtype, **FOUR)


def sections() -> dict[str, Any]:
    return {
        "ema": {"kind": "on", "decay": 0.8},
        "evaluate": {"micro_batch": 4, "weights": "ema"},
        "log": {"weight_norm_every": "1 steps"},
    }


def train_staged(settings: Any, dtype: torch.dtype = DOUBLE) -> Seen:
    return train("gpt", settings, 20, dtype, **FOUR)


def all_layers(found: list[Seen]) -> list[Seen]:
    """What was seen, each with the weights of all ranks; what several hold is the same."""
    weights: dict[str, torch.Tensor] = {}
    for seen in found:
        for name, weight in seen.weights.items():
            assert torch.equal(weights.setdefault(name, weight), weight), name
    for seen in found:
        seen.weights = weights
    return found


@pytest.mark.parametrize("schedule", ["gpipe"])
def test_stages_train_as_one_process(ranks: RankPool, schedule: str) -> None:
    parallel = {"pipeline": 2, "pipeline_schedule": schedule}
    found = ranks.run(2, train_staged, settings_of(1, parallel=parallel, **sections()))
    assert_alike(all_layers(found), alone(), 1e-10)
