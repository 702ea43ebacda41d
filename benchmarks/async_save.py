"""How long an asynchronous save keeps the training waiting, beside the bare copy to pinned memory.

The state is that of a GPT with 124 million parameters under AdamW: weights and two moments, about
1.5 GB. The bare copy goes from the same tensors into pinned memory that is there already.

    python benchmarks/async_save.py [--device cuda] [--repetitions 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from surefoot.models.gpt import GPT, GPTConfig
from surefoot.parallel.ranks import OneRank
from surefoot.state.commit import Draft
from surefoot.state.retention import Keep, Retention
from surefoot.state.saver import SavePolicy, Saver
from surefoot.state.shards import Piece, pieces_of

LIMIT_RATIO = 1.3
BASE = GPTConfig(
    vocabulary_size=50257, sequence_length=1024, num_layers=12, num_heads=12, num_kv_heads=12,
    embedding_dim=768, feedforward_dim=3072,
)  # fmt: skip
SMALL = GPTConfig(
    vocabulary_size=5000, sequence_length=256, num_layers=4, num_heads=4, num_kv_heads=4,
    embedding_dim=256, feedforward_dim=1024,
)  # fmt: skip


def make_pieces(device: str) -> list[Piece]:
    """Weights and moments; on a CPU a smaller model, to try the script."""
    torch.manual_seed(0)
    model = GPT(BASE if device == "cuda" else SMALL).to(device)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer/{name}/{moment}"] = torch.randn_like(parameter)
    return pieces_of(tensors)


def synchronize(device: str) -> None:
    """Waits for what the device was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def bare_copy_seconds(pieces: list[Piece], device: str, repetitions: int) -> float:
    """The copy of everything into pinned memory made beforehand."""
    pinned = device == "cuda"
    places = [torch.empty_like(p.data, device="cpu", pin_memory=pinned) for p in pieces]
    seconds = []
    for _ in range(repetitions + 1):
        synchronize(device)
        began = time.perf_counter()
        for place, piece in zip(places, pieces, strict=True):
            place.copy_(piece.data, non_blocking=True)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def stall_seconds(pieces: list[Piece], device: str, repetitions: int, folder: Path) -> list[float]:
    """What `save` takes until the training may go on; the first also makes its memory."""
    policy = SavePolicy("async", "stop")
    retention = Retention(folder, Keep(latest=1, best=0))
    saver = Saver(folder, policy, retention, OneRank(), lambda *_: None)
    seconds = []
    for step in range(1, repetitions + 2):
        synchronize(device)
        began = time.perf_counter()
        saver.save(Draft(step, pieces, {"step": step}, {}))
        seconds.append(time.perf_counter() - began)
        saver.finish()
    return seconds


def main() -> int:
    """Measures both, prints them, and says whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--repetitions", type=int, default=5)
    asked = parser.parse_args()
    pieces = make_pieces(asked.device)
    size = sum(piece.num_bytes for piece in pieces)
    bare = bare_copy_seconds(pieces, asked.device, asked.repetitions)
    with tempfile.TemporaryDirectory() as folder:
        first, *later = stall_seconds(pieces, asked.device, asked.repetitions, Path(folder))
    stall = statistics.median(later)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {size / 1e6:,.0f} MB of state")
    print(f"  copy to pinned memory {1e3 * bare:8.1f} ms ({size / bare / 1e9:.1f} GB/s)")
    print(f"  stall of a save       {1e3 * stall:8.1f} ms, x {stall / bare:.2f}")
    print(f"  stall of the first    {1e3 * first:8.1f} ms: it makes the pinned memory")
    word = "within" if stall <= LIMIT_RATIO * bare else "OVER"
    print(f"{word} the limit of x {LIMIT_RATIO}")
    return 0 if stall <= LIMIT_RATIO * bare else 1


if __name__ == "__main__":
    sys.exit(main())
