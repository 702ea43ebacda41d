"""What observing costs the run, in microseconds an update. Prints; asserts nothing.

Run: `python benchmarks/observe_cost.py [--device cuda]`. Each number is the smallest mean of
several rounds: a busy machine disturbs it least. The last lines set all of it against an update
of the model that `surefoot train` trains without a recipe.
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from surefoot.core.reports import StepReport
from surefoot.engine.guard import Guard
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.observe.metrics_log import MetricsLog
from surefoot.observe.observers import Observers
from surefoot.observe.probes import MemoryProbe, UtilizationProbe
from surefoot.observe.terminal.console import ConsoleView
from surefoot.observe.terminal.view import RunFacts
from surefoot.observe.time_ledger import Phase, TimeLedger
from surefoot.tasks.generation import GenerationTask
from surefoot.train_step import TrainStep

ROUNDS = 15
CALLS = 2000

REPORT = StepReport(
    step=12345,
    window=12346,
    epoch=3,
    samples=987654,
    tokens=123456789,
    loss=2.3456789012345,
    terms={},
    weight=16384.0,
    grad_norm=0.4123456789,
    clipped=False,
    applied=True,
    lr={"decay": 3e-4, "no_decay": 3e-4},
    loss_scale=1.0,
    sample_ids=tuple(range(100_000, 100_032)),
    step_seconds=0.0123456789,
    data_seconds=0.00012345,
    memory_bytes=123456789,
    time=1.7e9 + 0.123,
)


def microseconds(call: Callable[[], object]) -> float:
    """The smallest mean time of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - begin) / CALLS)
    return best * 1e6


def switch_phase(ledger: TimeLedger) -> Callable[[], None]:
    """Two switches: in and out."""
    scope = ledger.phase(Phase.DATA_WAIT)

    def switch() -> None:
        with scope:
            pass

    return switch


def judging(guard: Guard) -> Callable[[], object]:
    """An update as most are; the statistics are full."""
    draw = random.Random(0)
    reports = [
        REPORT._replace(
            loss=2 * draw.lognormvariate(0, 0.05), grad_norm=draw.lognormvariate(0, 0.2)
        )
        for _ in range(4096)
    ]
    endless = itertools.cycle(reports)
    return lambda: guard.judge(next(endless))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    facts = RunFacts("bench", "runs/bench", total=1e6)
    with tempfile.TemporaryDirectory() as folder:
        utilization = UtilizationProbe(device)
        log = MetricsLog(Path(folder) / "metrics.jsonl", utilization)
        console = ConsoleView(facts, "plain", io.StringIO()).start()
        observers = Observers([log], [console])
        empty = microseconds(lambda: None)
        rows = {
            "metrics log, one row": lambda: log.on_step(REPORT),
            "console, one report": lambda: console.on_step(REPORT),
            "both, through the fan-out": lambda: observers.on_step(REPORT),
            "memory probe": MemoryProbe(device),
            "utilization probe": utilization,
            "ledger, one switch": switch_phase(TimeLedger()),
            "guard with spikes": judging(Guard()),
        }
        for name, call in rows.items():
            cost = microseconds(call) - empty
            cost = cost / 2 if name.startswith("ledger") else cost
            print(f"{name:28} {cost:7.2f} µs")
        observers.close()
    of_an_update(device)


def of_an_update(device: str, blocks: int = 12, block_updates: int = 5) -> None:
    """The demo's model: an update by itself, one that is logged, one that is sampled.

    The three take turns, a block of updates each, so that a slower clock meets all alike.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = GPTConfig.llama(
        vocabulary_size=512, sequence_length=128, num_layers=4, num_heads=4, num_kv_heads=4,
        embedding_dim=128,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(0, 512, (16, 128))}
    with tempfile.TemporaryDirectory() as folder:
        log = MetricsLog(Path(folder) / "metrics.jsonl", UtilizationProbe(device))
        bare = updates_of(GPT(shape), device, "never", ())
        logged = updates_of(GPT(shape), device, "never", (Observers([log]),))
        sampled = updates_of(GPT(shape), device, "1 steps", (Observers([log]),))
        seconds: dict[str, list[float]] = {"bare": [], "logged": [], "sampled": []}
        for _ in range(blocks):
            for name, step in (("bare", bare), ("logged", logged), ("sampled", sampled)):
                begin = time.perf_counter()
                for _ in range(block_updates):
                    step(batch)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds[name].append((time.perf_counter() - begin) / block_updates)
        log.close()
    update = statistics.median(seconds["bare"])
    print(f"{'an update of the demo':28} {update * 1e6:9.1f} µs")
    for name, every in (("logged", 1), ("sampled", 100)):
        pairs = zip(seconds[name], seconds["bare"], strict=True)
        more = statistics.median(one - other for one, other in pairs) / every
        share = f"{more / update:7.2%} of it, one update in {every}"
        print(f"{name + ', more than that':28} {more * 1e6:9.1f} µs {share}")


def updates_of(
    model: GPT, device: str, details_every: str, observers: tuple[Observers, ...]
) -> TrainStep:
    """An update with everything that is on by default, on batches that are there."""
    settings = {
        "device": device,
        "train": {"horizon": "10000 steps"},
        "log": {"details_every": details_every, "weight_norm_every": "never"},
    }
    return TrainStep(model, GenerationTask(512), settings=settings, observers=observers)


if __name__ == "__main__":
    main()
