"""Models whose layers lie on several ranks train as one process does, by every schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

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
    return train("gpt", settings, 20, dtype, False, **FOUR)


@pytest.mark.parametrize("schedule", ["gpipe"])
def test_stages_train_as_one_process(ranks: RankPool, schedule: str) -> None:
    parallel = {"pipeline": 2, "pipeline_schedule": schedule}
    found = ranks.run(2, train_staged, settings_of(1, parallel=parallel, **sections()))
    for seen in found:
        assert seen.losses == pytest.approx(alone().losses, rel=1e-10, abs=0)
        assert seen.norms == pytest.approx(alone().norms, rel=1e-10, abs=0)
