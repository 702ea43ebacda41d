"""Trainings by the command, each in a forked process of its own, for faults at random moments."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.cli import main as command
from surefoot.engine import interrupt
from surefoot.engine.loop import Loop, Outcome
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.state.checkpoint import list_checkpoints
from surefoot.tasks.metrics import MetricTotals
from surefoot.verify.processes import child
from surefoot.verify.state_hash import checkpoint_hash

STARTED_NEVER = 120.0
"""Longest wait for a trial; a test that meets it has found a hang."""

MLP = """
name: trial
model: {kind: mlp, hidden: [16], dropout: 0.2}
data: {kind: diabetes}
task: {kind: regression}
optimizer: {kind: adamw, lr: 1e-2}
ema: {kind: "on", decay: 0.9}
schedule: {kind: plateau, patience: 1}
train: {horizon: 24 steps, micro_batch: 16, accumulation: 2}
evaluate: {every: 5 steps, micro_batch: 8, weights: ema}
checkpoint: {every: 4 steps}
log: {console: "off"}
guard: {restarts_without_progress: 100000}
"""
CNN = """
name: trial
model: {kind: resnet, widths: [4], blocks_per_stage: 1}
data: {kind: digits}
task: {kind: classification}
optimizer: {kind: sgd, lr: 0.1, momentum: 0.9}
train: {horizon: 24 steps, micro_batch: 64}
loader: {workers: 1}
evaluate: {every: 6 steps, micro_batch: 64}
checkpoint: {every: 4 steps}
log: {console: "off"}
guard: {restarts_without_progress: 100000}
"""
GPT = """
name: trial
model:
  {kind: gpt, num_layers: 1, num_heads: 2, embedding_dim: 16, feedforward_dim: 32, dropout: 0.1}
data:
  {kind: text, source: files, path: PATH, pattern: "*.txt", vocabulary_size: 257,
   sequence_length: 32}
task: {kind: generation}
optimizer: {kind: adamw, lr: 1e-2}
train: {horizon: 24 steps, micro_batch: 4, accumulation: 2}
evaluate: {every: 5 steps}
checkpoint: {every: 4 steps}
log: {console: "off"}
guard: {restarts_without_progress: 100000}
"""
RECIPES = {"mlp": MLP, "cnn": CNN, "gpt": GPT}


def write_recipe(folder: Path, name: str) -> Path:
    """The recipe as a file, with a text where it needs one."""
    text = RECIPES[name]
    if "PATH" in text:
        corpus = folder / "corpus"
        corpus.mkdir()
        for number in range(4):
            (corpus / f"{number}.txt").write_text(f"file {number}: " + "so it goes on. " * 200)
        text = text.replace("PATH", str(corpus))
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Trigger:
    """When a process sends itself a signal."""

    kind: str
    """`start`, `training`: so many seconds after that; `fsync`, `evaluation`: at so many calls."""
    amount: float
    signal: int = signal.SIGTERM

    @classmethod
    def draw(cls, moments: random.Random, seconds: float, training_seconds: float) -> Trigger:
        """A random one for a run that takes so long in all, and so long to train."""
        kind = moments.choice(["start", "training", "training", "fsync", "evaluation"])
        number = moments.choice([signal.SIGTERM, signal.SIGUSR1])
        if kind == "start":
            return cls(kind, moments.uniform(0.0, seconds - training_seconds), number)
        if kind == "training":
            return cls(kind, moments.uniform(0.0, training_seconds), number)
        return cls(kind, moments.randrange(1, 40 if kind == "fsync" else 20), number)


def run_command(arguments: list[str], trigger: Trigger | None, output: str) -> None:
    """Body of a process: the command, with a signal on the way."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    if trigger is not None:
        _arm(trigger)
    code = command.invoke(arguments)
    # As a program would end; what runs at its exit is not what is looked at.
    raise SystemExit(code)


def _arm(trigger: Trigger) -> None:
    def fire() -> None:
        os.kill(os.getpid(), trigger.signal)

    if trigger.kind in ("start", "training"):
        timer = threading.Timer(trigger.amount, fire)
        timer.daemon = True
        if trigger.kind == "start":
            _start_when_the_command_listens(timer)
        else:
            _start_with_the_first_update(timer)
        return
    counted = counting(fire, trigger.amount)
    if trigger.kind == "fsync":
        os.fsync = counted(os.fsync)
    else:
        MetricTotals.add = counted(MetricTotals.add)  # type: ignore[method-assign]


def counting(
    fire: Callable[[], None], amount: float
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes functions fire at so many calls of them."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == amount:
                fire()
            return function(*arguments, **named)

        return call

    return counted


def _start_when_the_command_listens(timer: threading.Timer) -> None:
    listens = interrupt.stopped_before_begin

    @contextmanager
    def begun() -> Iterator[None]:
        with listens():
            timer.start()
            yield

    interrupt.stopped_before_begin = begun


def _start_with_the_first_update(timer: threading.Timer) -> None:
    run = Loop.run

    def started(self: Loop) -> Outcome:
        timer.start()
        return run(self)

    Loop.run = started  # type: ignore[method-assign]


def train(
    arguments: list[str], output: Path, trigger: Trigger | None = None
) -> tuple[int | None, float]:
    """Exit code and seconds of `surefoot train` with these arguments."""
    began = time.monotonic()
    with child(run_command, ["train", *arguments], trigger, str(output)) as process:
        process.join(STARTED_NEVER)
        assert process.exitcode is not None, f"hangs: {arguments} {trigger}"
        return process.exitcode, time.monotonic() - began


def rows(run: Path) -> list[dict[str, Any]]:
    """The columns of a run that are compared with `==`."""
    return [deterministic(row) for row in read_rows(run / "metrics.jsonl")]


def only_run(runs: Path) -> Path | None:
    """The one run below a folder, if there is one."""
    found = list(runs.iterdir()) if runs.exists() else []
    assert len(found) <= 1
    return found[0] if found else None


def newest_step(run: Path) -> int:
    """Updates that the newest checkpoint of a run holds."""
    return int(list_checkpoints(run / "checkpoints")[-1].name.removeprefix("step-"))


def newest_hash(run: Path) -> str:
    """Of the whole state in it."""
    return checkpoint_hash(list_checkpoints(run / "checkpoints")[-1])
