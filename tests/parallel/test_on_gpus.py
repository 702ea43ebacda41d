"""The same parity on several GPUs, through NCCL: every layout trains as one GPU does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.rank_pool import RankPool
from parallel.small_runs import Seen, settings_of, train
from surefoot.models.attention import AttentionCore
from surefoot.parallel.ring import Ring, pass_around

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
    "CP": (2, 1, {"context": 2}),
    "CP, ring": (2, 1, {"context": 2, "context_exchange": "ring"}),
    "PP, 1f1b": (2, 1, {"pipeline": 2}),
    "PP, interleaved": (2, 1, {"pipeline": 2, "pipeline_schedule": "interleaved"}),
    "PP, zero-bubble": (2, 1, {"pipeline": 2, "pipeline_schedule": "zero-bubble"}),
    "EP": (2, 2, {"expert": 2}),
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


def on_gpu(settings: Any, with_experts: bool) -> Seen:
    model: dict[str, Any] = {"num_layers": 4}
    if with_experts:
        model["experts"] = {"num_experts": 4, "shared_experts": 1, "balance_weight": 0.1}
    seen = train("gpt", settings, 20, torch.float32, **model)
    # What goes to another process must not lie on this one's device.
    return replace(seen, weights={})


@cache
def alone(precision: str, with_experts: bool, seed: int = 0) -> Seen:
    return on_gpu(settings(1, {}, precision, seed), with_experts)


def settings(data_ranks: int, parallel: Any, precision: str, seed: int = 0) -> dict[str, Any]:
    made = settings_of(data_ranks, parallel=parallel, seed=seed, **SECTIONS)
    return {**made, "precision": {"dtype": precision}}


def laid_out(gpus: RankPool, name: str, precision: str) -> tuple[bool, list[Seen]]:
    """Whether the model has experts, and what each rank of a layout has seen."""
    num_ranks, data_ranks, parallel = LAYOUTS[name]
    if num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    with_experts = "expert" in parallel
    asked = settings(data_ranks, parallel, precision)
    return with_experts, gpus.run(num_ranks, on_gpu, asked, with_experts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_gpu_in_float32(gpus: RankPool, name: str) -> None:
    with_experts, found = laid_out(gpus, name, "fp32")
    expected = alone("fp32", with_experts)
    for seen in found:
        assert seen.losses == pytest.approx(expected.losses, rel=1e-4)
        assert seen.norms == pytest.approx(expected.norms, rel=1e-3)
        assert seen.counts == expected.counts
        assert seen.metrics == pytest.approx(expected.metrics, rel=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_bf16_within_twice_the_spread_of_seeds(gpus: RankPool, name: str) -> None:
    with_experts, found = laid_out(gpus, name, "bf16")
    last = [alone("bf16", with_experts, seed).losses[-1] for seed in range(5)]
    spread = max(last) - min(last)
    for seen in found:
        assert abs(seen.losses[-1] - last[0]) <= 2 * spread


def ring_errors() -> tuple[list[float], list[float]]:
    """Of result and gradients in bf16 against float32: by the ring, and by torch's attention."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    shapes = ((2, 4, 512, 64), (2, 2, 512, 64), (2, 2, 512, 64), (2, 4, 512, 64))
    whole = [torch.randn(shape, device="cuda") for shape in shapes]
    own = slice(rank * 512 // size, (rank + 1) * 512 // size)
    core = AttentionCore(grouped=True, dropout=0.0)

    def passed(attend: Any, tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        *inputs, gradient = [t.detach().to(dtype).requires_grad_() for t in tensors]
        mixed = attend(*inputs, None)
        return [mixed.detach(), *torch.autograd.grad(mixed, inputs, gradient)]

    exact = [t[:, :, own] for t in passed(core, whole, torch.float32)]
    plain = [t[:, :, own] for t in passed(core, whole, torch.bfloat16)]
    pass_around(core, Ring(dist.group.WORLD))
    ring = passed(core, [t[:, :, own] for t in whole], torch.bfloat16)

    def errors(found: list[torch.Tensor]) -> list[float]:
        pairs = zip(found, exact, strict=True)
        return [float((one.float() - other).norm() / other.norm()) for one, other in pairs]

    return errors(ring), errors(plain)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_ring_of_flash_attention_is_as_near_as_one_of_whole_sequences(
    gpus: RankPool, num_ranks: int
) -> None:
    if num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    for by_ring, by_torch in gpus.run(num_ranks, ring_errors):
        for ours, theirs in zip(by_ring, by_torch, strict=True):
            assert ours < 2 * theirs < 0.05
