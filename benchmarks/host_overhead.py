"""Host time of one update of `Trainer` over a bare loop, for a model that leaves the device idle.

Both train the same small MLP on the same tensors with the same fused optimizer (matrices decay,
biases do not), clipping and schedule. Ours does it with everything on: metrics log, events, guard,
record, console. The two take turns in one process, a block of updates each, and the median of the
differences between neighbouring blocks counts: a busy neighbour or a slower clock meets both alike.

    python benchmarks/host_overhead.py [--device cuda] [--blocks 150] [--block-updates 20]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot
from surefoot.core.schedules import WarmupCosine

LIMIT_MICROSECONDS = 100.0
NUM_SAMPLES, FEATURES, HIDDEN, BATCH = 4096, 32, 64, 32
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, WARMUP, HORIZON = 1e-3, 0.1, 1.0, 10, 2000
BLOCKS_BEFORE_THE_CLOCK = 10


def make_model() -> nn.Module:
    """A perceptron whose kernels take far less time than their launches."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, 1),
    )  # fmt: skip


def make_data() -> tuple[Tensor, Tensor]:
    """Inputs and targets on the CPU, where a dataset lies."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, FEATURES, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True)


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Sum of squared errors."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets, reduction="sum")


@dataclass
class TurnTaking:
    """An observer that lets the bare loop run a block after each block of ours, timing both."""

    bare: Iterator[None]
    block_updates: int
    ours_seconds: list[float] = field(default_factory=list)
    bare_seconds: list[float] = field(default_factory=list)
    _began: float = 0.0

    def on_step(self, report: surefoot.StepReport) -> None:
        if report.step % self.block_updates:
            return
        ended = time.perf_counter()
        if self._began:
            self.ours_seconds.append(ended - self._began)
            for _ in range(self.block_updates):
                next(self.bare)
            self.bare_seconds.append(time.perf_counter() - ended)
        self._began = time.perf_counter()

    def on_eval(self, report: surefoot.EvalReport) -> None: ...

    def on_event(self, event: surefoot.Event) -> None: ...

    def close(self) -> None: ...


def run_both(device: str, blocks: int, block_updates: int) -> TurnTaking:
    """Trains with `Trainer`, with all that it records, and with the bare loop by turns."""
    turns = TurnTaking(bare_loop(device), block_updates)
    updates = (blocks + BLOCKS_BEFORE_THE_CLOCK + 1) * block_updates
    settings = {
        "device": device,
        "train": {"horizon": f"{updates} steps", "micro_batch": BATCH, "clip_norm": MAX_NORM},
        "optimizer": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": [0.9, 0.999]},
        "schedule": {"kind": "warmup_cosine", "warmup": WARMUP},
        "precision": {"dtype": "fp32"},
        "evaluate": {"every": "never"},
        "checkpoint": {"every": "end"},
        "log": {"console": "plain"},
    }
    with tempfile.TemporaryDirectory() as runs, contextlib.redirect_stderr(io.StringIO()):
        surefoot.Trainer(
            make_model(), make_data(), loss_sum, settings=settings, observers=[turns], runs=runs
        ).fit()
    return turns


def bare_loop(device: str) -> Iterator[None]:
    """The shortest loop that does the same arithmetic; each `next` is one update."""
    model = make_model().to(device)
    inputs, targets = make_data()
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    schedule = WarmupCosine(WARMUP, HORIZON, 0.1)
    order: list[Tensor] = []
    for n in itertools.count():
        if not order:
            order = list(torch.randperm(NUM_SAMPLES).split(BATCH))
        index = order.pop()
        batch = inputs[index], targets[index]
        if device == "cuda":
            batch = tuple(t.pin_memory().to(device, non_blocking=True) for t in batch)
        optimizer.zero_grad(set_to_none=True)
        (loss_sum(model, batch) / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * schedule(n)
        optimizer.step()
        yield


def main() -> int:
    """Measures, prints both side by side, and says whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--blocks", type=int, default=150)
    parser.add_argument("--block-updates", type=int, default=20)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    turns = run_both(asked.device, asked.blocks, asked.block_updates)
    microseconds = 1e6 / asked.block_updates
    ours = [microseconds * s for s in turns.ours_seconds[BLOCKS_BEFORE_THE_CLOCK:]]
    bare = [microseconds * s for s in turns.bare_seconds[BLOCKS_BEFORE_THE_CLOCK:]]
    over = [mine - theirs for mine, theirs in zip(ours, bare, strict=True)]
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {len(over)} pairs of {asked.block_updates} updates")
    print("us an update      median   quartiles")
    for label, values in (("bare loop", bare), ("surefoot", ours), ("difference", over)):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"  {label:<12}{middle:10.1f}   {low:.1f} to {high:.1f}")
    median = statistics.median(over)
    word = "within" if median <= LIMIT_MICROSECONDS else "OVER"
    print(f"{word} the limit of {LIMIT_MICROSECONDS:.0f} us of wall time")
    return 0 if median <= LIMIT_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
