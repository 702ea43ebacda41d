"""Replicas train as one process does: the same losses, norms, counts, weights and metrics."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from parallel.checks import assert_alike
from parallel.rank_pool import RankPool
from parallel.small_runs import Seen, settings_of, train

DOUBLE, SINGLE = torch.float64, torch.float32


@cache
def alone(kind: str, dtype: torch.dtype) -> Seen:
    return train(kind, settings_of(), dtype=dtype)


@pytest.mark.parametrize(("dtype", "rtol"), [(DOUBLE, 1e-10), (SINGLE, 1e-5)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replicas_train_as_one_process(
    ranks: RankPool, num_ranks: int, dtype: torch.dtype, rtol: float
) -> None:
    settings = settings_of(num_ranks)
    found = ranks.run(num_ranks, train, "gpt", settings, 20, dtype)
    assert_alike(found, alone("gpt", dtype), rtol)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [3, 5])
def test_metrics_are_those_of_one_process(
    ranks: RankPool, num_ranks: int, micro_batch: int
) -> None:
    settings: dict[str, Any] = settings_of(evaluate={"micro_batch": micro_batch})
    expected = train("gpt", settings_of(), 0).metrics
    for seen in ranks.run(num_ranks, train, "gpt", settings, 0):
        assert seen.metrics == pytest.approx(expected, rel=1e-12)
    assert expected["samples"] == 37
