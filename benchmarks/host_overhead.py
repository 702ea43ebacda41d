"""Host time of one update of `Trainer` over a bare loop, for a model that leaves the device idle.

Both train the same small MLP on the same tensors with the same fused optimizer (matrices decay,
biases do not), clipping and schedule. Ours does it with everything on: metrics log, events, guard,
record, console. Repetitions of the two alternate, and the best of each counts: what is slower is
the neighbours' doing. The processor time of the process stands beside the wall time, which another
process can stretch.

    python benchmarks/host_overhead.py [--device cuda] [--updates 2000] [--repetitions 7]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot
from surefoot.core.schedules import WarmupCosine

LIMIT_MICROSECONDS = 100.0
NUM_SAMPLES, FEATURES, HIDDEN, BATCH = 4096, 32, 64, 32
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, WARMUP = 1e-3, 0.1, 1.0, 10
UPDATES_BEFORE_THE_CLOCK = 100


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


class Cost(NamedTuple):
    """What one update takes, in microseconds."""

    wall: float
    processor: float


class Clock:
    """An observer that reads the clocks after the first UPDATES_BEFORE_THE_CLOCK and after all."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self._readings: list[tuple[float, float]] = []

    def read(self) -> None:
        self._readings.append((time.perf_counter(), time.process_time()))

    def on_step(self, report: surefoot.StepReport) -> None:
        if report.step in (UPDATES_BEFORE_THE_CLOCK, self.updates):
            self.read()

    def on_eval(self, report: surefoot.EvalReport) -> None: ...

    def on_event(self, event: surefoot.Event) -> None: ...

    def close(self) -> None: ...

    def cost(self) -> Cost:
        begin, end = self._readings
        updates = self.updates - UPDATES_BEFORE_THE_CLOCK
        return Cost(
            *(1e6 * (after - before) / updates for before, after in zip(begin, end, strict=True))
        )


def surefoot_loop(device: str, updates: int) -> Cost:
    """One update of `Trainer`, with all that it records."""
    clock = Clock(updates)
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
            make_model(), make_data(), loss_sum, settings=settings, observers=[clock], runs=runs
        ).fit()
    return clock.cost()


def bare_loop(device: str, updates: int) -> Cost:
    """One update of the shortest loop that does the same arithmetic."""
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
    schedule = WarmupCosine(WARMUP, updates, 0.1)
    order: list[Tensor] = []
    clock = Clock(updates)
    for n in range(updates):
        if n == UPDATES_BEFORE_THE_CLOCK:
            clock.read()
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
    if device == "cuda":
        torch.cuda.synchronize()
    clock.read()
    return clock.cost()


def main() -> int:
    """Measures, prints both side by side, and says whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--repetitions", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    bare, ours = [], []
    for _ in range(asked.repetitions):
        bare.append(bare_loop(asked.device, asked.updates))
        ours.append(surefoot_loop(asked.device, asked.updates))
    best_bare, best_ours = (Cost(*map(min, zip(*costs, strict=True))) for costs in (bare, ours))
    over = Cost(*(mine - theirs for mine, theirs in zip(best_ours, best_bare, strict=True)))
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    print(
        f"{name}, torch {torch.__version__}, best of {asked.repetitions} x {asked.updates} updates"
    )
    print("us an update        wall   processor")
    rows = (("bare loop", best_bare), ("surefoot", best_ours), ("difference", over))
    for label, cost in rows:
        print(f"  {label:<12}{cost.wall:10.1f}{cost.processor:12.1f}")
    word = "within" if over.wall <= LIMIT_MICROSECONDS else "OVER"
    print(f"{word} the limit of {LIMIT_MICROSECONDS:.0f} us of wall time")
    return 0 if over.wall <= LIMIT_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
