"""The same parity on several GPUs, through NCCL: every layout trains as one GPU does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from parallel.rank_pool import RankPool
from parallel.small_runs import Seen, settings_of, train

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
SECTIONS: dict[str, Any] = {
    "device": "cuda",
    "ema": {"kind": "on", "decay": 0.8},
    "evaluate": {"micro_batch": 4, "weights": "ema"},
    "log": {"weight_norm_every": "1 steps"},
}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "DDP": (2, 2, {}),
    "ZeRO-1": (2, 2, {"shard": 2, "shards": "optimizer"}),
    "ZeRO-2": (2, 2, {"shard": 2, "shards": "gradients"}),
    "ZeRO-3": (2, 2, {"shard": 2}),
    "TP": (2, 1, {"tensor": 2}),
    "TP+SP": (2, 1, {"tensor": 2, "cut_sequence": True}),
    "DDP of 4": (4, 4, {}),
    "HSDP": (4, 4, {"shard": 2, "replicate": 2}),
    "TPxFSDP": (4, 2, {"tensor": 2, "shard": 2}),
    "TP+SPxDP": (4, 2, {"tensor": 2, "replicate": 2, "cut_sequence": True}),
}


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    if NUM_GPUS < 2:
        pytest.skip("needs two CUDA devices")
    pool = RankPool(min(NUM_GPUS, 4), on_gpus=True)
    yield pool
    pool.close()


def on_gpu(settings: Any, dtype: torch.dtype) -> Seen:
    return train("gpt", settings, 20, dtype)


@cache
def alone(precision: str, seed: int = 0) -> Seen:
    return on_gpu(settings(1, {}, precision, seed), torch.float32)


def settings(data_ranks: int, parallel: Any, precision: str, seed: int = 0) -> dict[str, Any]:
    made = settings_of(data_ranks, parallel=parallel, seed=seed, **SECTIONS)
    return {**made, "precision": {"dtype": precision}}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_gpu_in_float32(gpus: RankPool, name: str) -> None:
    num_ranks, data_ranks, parallel = LAYOUTS[name]
    if num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    asked = settings(data_ranks, parallel, "fp32")
    expected = alone("fp32")
    for seen in gpus.run(num_ranks, on_gpu, asked, torch.float32):
        assert seen.losses == pytest.approx(expected.losses, rel=1e-4)
        assert seen.norms == pytest.approx(expected.norms, rel=1e-3)
        assert seen.counts == expected.counts
        assert seen.metrics == pytest.approx(expected.metrics, rel=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_bf16_within_twice_the_spread_of_seeds(gpus: RankPool, name: str) -> None:
    num_ranks, data_ranks, parallel = LAYOUTS[name]
    if num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    last = [alone("bf16", seed).losses[-1] for seed in range(5)]
    spread = max(last) - min(last)
    asked = settings(data_ranks, parallel, "bf16")
    for seen in gpus.run(num_ranks, on_gpu, asked, torch.float32):
        assert abs(seen.losses[-1] - last[0]) <= 2 * spread
