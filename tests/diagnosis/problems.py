"""Three small trainings, seconds each, in a plain loop that writes down what it does.

A `Setup` holds everything that a fault may spoil; `train` runs it and returns the log. Nothing here
knows the doctor.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.models.gpt import GPT, GPTConfig

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass
class Log:
    """What a run wrote down."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def event(self, kind: str, step: int, message: str) -> None:
        self.events.append({"kind": kind, "step": step, "message": message, "time": time.time()})

    def write(self, path: Path) -> Path:
        """As JSONL: facts, rows, events."""
        lines: list[dict[str, Any]] = [{"facts": self.facts}, *self.rows, *self.events]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path


@dataclass
class Setup:
    """One training, before anything is wrong with it."""

    name: str
    model: nn.Module
    train: Batch
    validation: Batch
    loss: Loss
    rate: float
    """Of AdamW, that suits it."""
    generator: torch.Generator
    seed: int
    updates: int = 240
    batch_size: int = 32
    clip: float | None = 1.0
    weight_decay: float = 0.01
    evaluate_every: int = 20
    schedule: Callable[[int, int], float] = lambda n, total: warmup_cosine(n, total)
    make_optimizer: Callable[[Setup], torch.optim.Optimizer] | None = None
    order: Callable[[Setup], Iterator[Tensor]] | None = None
    before_update: Callable[[int], dict[str, Any] | None] | None = None
    """Called before each update; what it returns stands in the row."""
    clear_gradients: bool = True
    skip_non_finite: bool = False
    logs_ids: bool = True
    dtype: torch.dtype = torch.float32
    scaler: torch.amp.GradScaler | None = None
    towers: dict[str, nn.Module] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)
    log: Log = field(default_factory=Log)

    @property
    def is_language(self) -> bool:
        return self.name == "gpt"

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)


def warmup_cosine(n: int, total: int, warmup: float = 0.05, floor: float = 0.1) -> float:
    rise = max(1, round(warmup * total))
    if n < rise:
        return (n + 1) / rise
    share = min(1.0, (n - rise) / max(1, total - rise))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))


def shuffled(setup: Setup) -> Iterator[Tensor]:
    """Indices of endless epochs, each in an order of its own; whole batches only."""
    count = len(setup.train[0])
    while True:
        order = torch.randperm(count, generator=setup.generator)
        for first in range(0, count - setup.batch_size + 1, setup.batch_size):
            yield order[first : first + setup.batch_size]


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, -2), targets.flatten())


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    table = load_digits()
    return torch.tensor(table.data, dtype=torch.float32) / 16, torch.tensor(table.target)


def _split_digits(generator: torch.Generator, noise: float) -> tuple[Batch, Batch]:
    inputs, targets = _digits()
    order = torch.randperm(len(inputs), generator=generator)
    inputs, targets = inputs[order], targets[order]
    inputs = inputs + noise * torch.randn(inputs.shape, generator=generator)
    return (inputs[:1400], targets[:1400]), (inputs[1400:], targets[1400:])


@functools.cache
def _text() -> Tensor:
    text = inspect.getsource(argparse) + inspect.getsource(inspect)
    return torch.tensor([min(ord(letter), 127) for letter in text])


def _split_text(length: int) -> tuple[Batch, Batch]:
    ids = _text()
    count = (len(ids) - 1) // length
    inputs = ids[: count * length].view(count, length)
    targets = ids[1 : count * length + 1].view(count, length)
    held = torch.arange(count) % 10 == 0
    return (inputs[~held], targets[~held]), (inputs[held][:64], targets[held][:64])


def mlp(seed: int, noise: float = 0.25) -> Setup:
    generator = torch.Generator().manual_seed(1000 + seed)
    train, validation = _split_digits(generator, noise)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
    model.append(nn.Linear(48, 10))
    return Setup("mlp", model, train, validation, cross_entropy, 3e-3, generator, seed, updates=300)


def cnn(seed: int, noise: float = 0.25) -> Setup:
    generator = torch.Generator().manual_seed(2000 + seed)
    train, validation = _split_digits(generator, noise)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    return Setup("cnn", model, train, validation, cross_entropy, 2e-3, generator, seed, updates=220)


def gpt(seed: int) -> Setup:
    generator = torch.Generator().manual_seed(3000 + seed)
    length = 32
    train, validation = _split_text(length)
    torch.manual_seed(seed)
    config = GPTConfig(
        vocabulary_size=128,
        sequence_length=length,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        embedding_dim=32,
        feedforward_dim=64,
    )
    setup = Setup("gpt", GPT(config), train, validation, cross_entropy, 6e-3, generator, seed)
    setup.batch_size = 16
    return setup


PROBLEMS: dict[str, Callable[[int], Setup]] = {"mlp": mlp, "cnn": cnn, "gpt": gpt}


def train(setup: Setup) -> Log:
    """Runs it to its end, to an error for lack of memory, or a few updates into NaN."""
    model, log = setup.model, setup.log
    log.facts.setdefault("precision", str(setup.dtype).removeprefix("torch."))
    log.event("start", 0, "the run begins")
    optimizer = (setup.make_optimizer or _adamw)(setup)
    indices = (setup.order or shuffled)(setup)
    epoch_length = len(setup.train[0]) / setup.batch_size
    process = psutil.Process()
    items = tokens = num_broken = 0
    began = time.perf_counter()
    for n in range(setup.updates):
        fetched = time.perf_counter()
        further = setup.before_update(n) if setup.before_update else None
        ids = next(indices)
        inputs, targets = setup.train[0][ids], setup.train[1][ids]
        waited = time.perf_counter() - fetched
        rate = setup.rate * setup.schedule(n, setup.updates)
        for group in optimizer.param_groups:
            group["lr"] = rate
        try:
            loss, norms = _update(setup, optimizer, inputs, targets)
        except torch.OutOfMemoryError as error:
            log.event("failure", n, f"OutOfMemoryError: {error}")
            return log
        items += len(ids)
        tokens += targets.numel() if setup.is_language else 0
        now = time.perf_counter()
        log.rows.append(
            {
                "row": "step",
                "step": n + 1,
                "epoch": int(n / epoch_length),
                "samples": items,
                "tokens": tokens,
                "loss": loss,
                **norms,
                "lr": rate,
                "weight": len(ids) * (targets.shape[1] if setup.is_language else 1),
                "weight_norm": _norm(model.parameters()) if n % 10 == 0 else None,
                "step_seconds": now - began,
                "data_seconds": waited,
                "memory_bytes": process.memory_info().rss,
                **({"sample_ids": ids.tolist()} if setup.logs_ids else {}),
                **(further or {}),
            }
        )
        began = now
        if (n + 1) % setup.evaluate_every == 0:
            log.rows.append(_evaluation(setup, n + 1))
            began = time.perf_counter()
        num_broken += not math.isfinite(loss)
        if num_broken == 12 and not setup.skip_non_finite:
            break
    return log


def _adamw(setup: Setup) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        setup.model.parameters(), lr=setup.rate, weight_decay=setup.weight_decay
    )


def _update(
    setup: Setup, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> tuple[float, dict[str, Any]]:
    model, scaler = setup.model, setup.scaler
    if setup.clear_gradients:
        optimizer.zero_grad()
    with torch.autocast("cpu", setup.dtype, enabled=setup.dtype != torch.float32):
        loss = setup.loss(model, inputs, targets)
    used_scale = scaler.get_scale() if scaler else 1.0
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(optimizer)
    parameters = [p for p in model.parameters() if p.grad is not None]
    norms: dict[str, Any] = {"grad_norm": _norm(p.grad for p in parameters)}
    for name, tower in setup.towers.items():
        norms[f"grad_norm/{name}"] = _norm(p.grad for p in tower.parameters() if p.grad is not None)
    finite = math.isfinite(norms["grad_norm"])
    if setup.clip is not None and finite:
        nn.utils.clip_grad_norm_(parameters, setup.clip)
    if scaler:
        scaler.step(optimizer)
        scaler.update()
        norms["loss_scale"] = used_scale
        norms["applied"] = finite
    elif finite or not setup.skip_non_finite:
        optimizer.step()
    else:
        norms["applied"] = False
    return float(loss.detach()), norms


def _norm(tensors: Any) -> float:
    parts = [tensor.detach().double().norm() for tensor in tensors]
    return float(torch.stack(parts).norm()) if parts else 0.0


def _evaluation(setup: Setup, step: int) -> dict[str, Any]:
    model = setup.model.eval()
    inputs, targets = setup.validation
    with torch.no_grad():
        loss = float(setup.loss(model, inputs, targets))
        hits = float((model(inputs).argmax(-1) == targets).float().mean())
    model.train()
    metrics = {"loss": loss} if setup.is_language else {"loss": loss, "accuracy": hits}
    return {"row": "eval", "step": step, "name": "validation", "metrics": metrics}
