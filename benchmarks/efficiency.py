"""How much of one GPU's speed each of several keeps: replicas of GPT-2, shards of a 1B Llama.

Each case trains on one GPU and on N of the same machine, in the same call, with the same batch on
each GPU; efficiency is tokens a second of one of N over those of one alone. The median of the
updates after the first few counts.

    python benchmarks/efficiency.py [--gpus 2 4] [--case ddp-gpt2-124m] [--updates 30]
    python benchmarks/efficiency.py --device cpu --gpus 2      # tries the script on tiny models
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import surefoot
from surefoot.assembly.process import prepare_process
from surefoot.assembly.run_parts import Material, assemble
from surefoot.config.load import resolve_settings
from surefoot.data.order import Cursor
from surefoot.data.sources.datasets import as_source
from surefoot.models.gpt import GPT, GPTConfig

UPDATES_BEFORE_THE_CLOCK = 8
SECONDS_A_RUN = 240
GPT2_124M = GPTConfig.gpt2(
    vocabulary_size=50_304, sequence_length=1024, num_layers=12, num_heads=12, embedding_dim=768
)
LLAMA_1B = GPTConfig.llama(
    vocabulary_size=128_256,
    sequence_length=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    embedding_dim=2048,
    feedforward_dim=8192,
    tied=True,
)
TINY = GPTConfig.llama(
    vocabulary_size=256,
    sequence_length=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    embedding_dim=64,
    feedforward_dim=128,
)


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is laid out on several GPUs."""

    config: GPTConfig
    micro_batch: int
    accumulation: int
    least_efficiency: float
    parallel: dict[str, Any] = field(default_factory=dict)


CASES = {
    "ddp-gpt2-124m": Case(GPT2_124M, 16, 4, 0.95),
    "fsdp-llama-1b": Case(LLAMA_1B, 8, 1, 0.93, {"shard": "auto", "gather": "as-computed"}),
}


class RandomTokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that cost nothing to read."""

    def __init__(self, config: GPTConfig, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        size = (64, config.sequence_length)
        self.rows = torch.randint(config.vocabulary_size, size, generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index % len(self.rows)]}


class Clock:
    """An observer that keeps the seconds of each update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step(self, report: surefoot.StepReport) -> None:
        self.seconds.append(report.step_seconds)
        self.losses.append(report.loss)

    def on_eval(self, report: surefoot.EvalReport) -> None: ...

    def on_event(self, event: surefoot.Event) -> None: ...

    def close(self) -> None: ...


def run_rank(case: Case, device: str, updates: int, out: Path) -> None:
    """One rank: trains, and leaves its speed and its peak memory."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = case.config if device == "cuda" else TINY
    torch.manual_seed(0)
    model = GPT(config)
    clock = Clock()
    samples = case.micro_batch * case.accumulation * ranks * (updates + 2)
    settings = {
        "device": device,
        "train": {
            "horizon": f"{updates} steps",
            "micro_batch": case.micro_batch,
            "accumulation": case.accumulation,
            "clip_norm": 1.0,
            "compile": "blocks" if device == "cuda" else "off",
        },
        "parallel": case.parallel if ranks > 1 else {},
        "optimizer": {"kind": "adamw", "lr": 3e-4},
        "schedule": {"kind": "constant", "warmup": 2},
        "precision": {"dtype": "bf16"},
        "evaluate": {"every": "never"},
        "log": {"console": "off"},
    }
    # The loop of a run without its folder: a checkpoint of 15 GB would take longer than the rest.
    resolved = resolve_settings(settings).config
    process = prepare_process(resolved)
    task = surefoot.GenerationTask(config.vocabulary_size)
    data = as_source(RandomTokens(config, samples), "training data")
    assembly = assemble(Material(model, task, data, {}), resolved, process)
    update = assembly.make_update((clock,))
    with closing(assembly.open_windows(Cursor())) as windows:
        for window in itertools.islice(windows, updates):
            update(window)
        update.parts.log.settle()
    assembly.close()
    seconds = statistics.median(clock.seconds[UPDATES_BEFORE_THE_CLOCK:])
    tokens = case.micro_batch * case.accumulation * config.sequence_length
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    told = {"tokens_a_second": tokens / seconds, "peak_bytes": peak, "losses": clock.losses}
    rank = os.environ.get("RANK", "0")
    (out / f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")


def measure(name: str, device: str, ranks: int, updates: int) -> list[dict[str, Any]]:
    """What each of so many ranks has left; they are started by torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--as-rank", folder, "--case", name, "--device", device]
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        launch += ["--local-addr", "127.0.0.1", __file__, *words, "--updates", str(updates)]
        done = subprocess.run(launch, capture_output=True, text=True, timeout=SECONDS_A_RUN)
        if done.returncode:
            raise SystemExit(f"{name} on {ranks}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return [json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))]


def main() -> int:
    """Measures each case on one and on several GPUs, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--gpus", type=int, nargs="+", default=[torch.cuda.device_count() or 2])
    parser.add_argument("--case", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_rank is not None:
        run_rank(CASES[asked.case[0]], asked.device, asked.updates, asked.as_rank)
        return 0
    card = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu, tiny models"
    print(f"{card}, torch {torch.__version__}, bf16, AdamW, clipping, {asked.updates} updates")
    print(f"{'case':<16}{'GPUs':>5}{'tokens/s a GPU':>16}{'efficiency':>12}{'peak a rank':>14}")
    holds = True
    for name in asked.case:
        alone = 0.0
        for ranks in (1, *asked.gpus):
            told = measure(name, asked.device, ranks, asked.updates)
            speed = min(rank["tokens_a_second"] for rank in told)
            alone = alone or speed
            peak = max(rank["peak_bytes"] for rank in told) / 2**30
            word = "" if ranks == 1 or speed / alone >= CASES[name].least_efficiency else "  LOW"
            holds &= not word
            print(
                f"{name:<16}{ranks:>5}{speed:>16,.0f}{speed / alone:>12.1%}{peak:>10.2f} GiB{word}",
                flush=True,
            )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
