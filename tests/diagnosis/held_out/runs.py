"""Small real trainings, healthy or with a planted fault, that no threshold was tuned on.

They share no code with `problems.py` and `sick_runs.py`: other models, data, optimizers, schedules,
columns and logging intervals, as people write them. Do not tune a threshold on them: add what they
teach to `tests/diagnosis` in another form, and leave these as they are.
"""

from __future__ import annotations

import csv
import difflib
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from torch import Tensor, nn
from torch.nn import functional as F

Pair = tuple[Tensor, Tensor]


@dataclass
class Run:
    """One training and everything that a fault may spoil."""

    model: nn.Module
    train: Pair
    held: Pair
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    epochs: int
    batch: int = 32
    rate: Callable[[float], float] = lambda done: 1.0
    """Multiplier of the rate for the share of the run that is done."""
    clip: float | None = None
    shuffle: bool = True
    clear: bool = True
    log_every: int = 1
    log_norm: bool = True
    has_accuracy: bool = False
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    rows: list[dict[str, Any]] = field(default_factory=list)


def fit(run: Run) -> list[dict[str, Any]]:
    """Trains, and returns the rows of its log."""
    count = len(run.train[0])
    per_epoch = math.ceil(count / run.batch)
    total, step = run.epochs * per_epoch, 0
    bases = [group["lr"] for group in run.optimizer.param_groups]
    for epoch in range(run.epochs):
        order = run.draw.permutation(count) if run.shuffle else np.arange(count)
        for ids in np.array_split(order, per_epoch):
            rate = run.rate(step / total)
            for group, base in zip(run.optimizer.param_groups, bases, strict=True):
                group["lr"] = base * rate
            if run.clear:
                run.optimizer.zero_grad()
            inputs, targets = run.train[0][ids], run.train[1][ids]
            loss = run.loss(run.model, inputs, targets)
            loss.backward()
            bound = run.clip if run.clip is not None else math.inf
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), bound)
            run.optimizer.step()
            step += 1
            if step % run.log_every == 0:
                row = {"step": step, "epoch": epoch, "loss": loss.item()}
                row["lr"] = run.optimizer.param_groups[0]["lr"]
                run.rows.append(row | ({"grad_norm": norm.item()} if run.log_norm else {}))
        run.rows.append({"step": step, **evaluate(run)})
    return run.rows


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    run.model.eval()
    inputs, targets = run.held
    found = {"val_loss": run.loss(run.model, inputs, targets).item()}
    if run.has_accuracy:
        found["val_acc"] = float((run.model(inputs).argmax(-1) == targets).float().mean())
    run.model.train()
    return found


def cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def warm(done: float) -> float:
    return min(1.0, 20 * done + 0.02) * (0.1 + 0.9 * cosine(done))


def classify(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def regress(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(model(inputs).squeeze(-1), targets)


def foretell(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def rebuild(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(model(inputs), inputs)


# -- data ------------------------------------------------------------------------------------------


def split(inputs: Any, targets: Any, kind: torch.dtype, seed: int) -> tuple[Pair, Pair]:
    table, answers = torch.tensor(inputs).float(), torch.tensor(targets).to(kind)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    table, answers = table[order], answers[order]
    at = int(0.8 * len(table))
    return (table[:at], answers[:at]), (table[at:], answers[at:])


def scaled(table: np.ndarray) -> np.ndarray:
    return (table - table.mean(0)) / table.std(0)


def digits(seed: int) -> tuple[Pair, Pair]:
    found = load_digits()
    return split(found.data / 8 - 1, found.target, torch.int64, seed)


@functools.cache
def characters() -> Tensor:
    text = inspect.getsource(textwrap) + inspect.getsource(difflib)
    return torch.tensor([min(ord(letter), 127) for letter in text])


def text(seed: int, length: int = 40) -> tuple[Pair, Pair]:
    ids = characters()
    windows = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    at = int(0.9 * len(windows))
    train, held = windows[order[:at]], windows[order[at:]]
    return (train[:, :-1], train[:, 1:]), (held[:, :-1], held[:, 1:])


# -- models ----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int = 64) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(128, 32), kind(32, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids))[0])


class Attention(nn.Module):
    def __init__(self, is_causal: bool = True, width: int = 48) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(128, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 96, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.is_causal = nn.Linear(width, 128), is_causal

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1) if self.is_causal else None
        return self.head(self.body(self.embed(ids) + self.place.weight[:length], mask=mask))


def softmax_regression(seed: int) -> Run:
    train, held = digits(seed)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Run(model, train, held, classify, optimizer, 12, 64, has_accuracy=True)


def tanh_layers(seed: int) -> Run:
    train, held = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
    model.append(nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Run(model, train, held, classify, optimizer, 8, rate=cosine, has_accuracy=True)


def convolutions(seed: int) -> Run:
    train, held = digits(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(512, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    steps = lambda done: 1.0 if done < 0.5 else 0.1 if done < 0.8 else 0.01  # noqa: E731
    return Run(model, train, held, classify, optimizer, 8, rate=steps, log_norm=False)


def autoencoder(seed: int) -> Run:
    train, held = digits(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Run(model, train, held, rebuild, optimizer, 10, log_every=2)


def regression(seed: int) -> Run:
    found = load_diabetes()
    train, held = split(scaled(found.data), scaled(found.target), torch.float32, seed)
    model = nn.Sequential(nn.Linear(10, 16), nn.SiLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return Run(model, train, held, regress, optimizer, 20, 32, rate=warm)


def linear_regression(seed: int) -> Run:
    found = load_diabetes()
    train, held = split(scaled(found.data), scaled(found.target), torch.float32, seed)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Run(model, train, held, regress, optimizer, 20, 16, log_norm=False)


def tumours(seed: int) -> Run:
    found = load_breast_cancer()
    train, held = split(scaled(found.data), found.target, torch.int64, seed)
    model = nn.Sequential(nn.Linear(30, 12), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return Run(model, train, held, classify, optimizer, 15, 16, rate=cosine, has_accuracy=True)


def wines(seed: int) -> Run:
    found = load_wine()
    train, held = split(scaled(found.data), found.target, torch.int64, seed)
    model = nn.Sequential(nn.Linear(13, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    return Run(model, train, held, classify, optimizer, 30, 16, has_accuracy=True)


def gru(seed: int) -> Run:
    train, held = text(seed)
    model = Recurrent(nn.GRU)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    return Run(model, train, held, foretell, optimizer, 5, 32, rate=cosine, clip=1.0)


def lstm(seed: int) -> Run:
    train, held = text(seed)
    model = Recurrent(nn.LSTM)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    return Run(model, train, held, foretell, optimizer, 4, 32, clip=5.0, log_every=2)


def attention(seed: int) -> Run:
    train, held = text(seed)
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    return Run(model, train, held, foretell, optimizer, 6, 32, rate=warm, clip=1.0)


def bigrams(seed: int) -> Run:
    train, held = text(seed)
    model = nn.Embedding(128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return Run(model, train, held, foretell, optimizer, 6, 32, rate=warm, log_norm=False)


def fine_tuning(seed: int) -> Run:
    """A model of upright digits goes on with mirrored ones, gently."""
    run = tanh_layers(seed)
    fit(run)
    mirror = torch.arange(64).view(8, 8).flip(1).flatten()
    train, held = ((pair[0][:, mirror], pair[1]) for pair in (run.train, run.held))
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=2e-4)
    return Run(run.model, train, held, classify, optimizer, 6, rate=warm, has_accuracy=True)


def frozen_body(seed: int) -> Run:
    """Only a small head is trained on a good model: little is left to gain."""
    run = convolutions(seed)
    fit(run)
    run.model.requires_grad_(False)[-1].requires_grad_(True)
    optimizer = torch.optim.AdamW(run.model[-1].parameters(), lr=1e-3)
    return Run(run.model, run.train, run.held, classify, optimizer, 6, rate=cosine)


KINDS: dict[str, Callable[[int], Run]] = {
    made.__name__: made
    for made in (
        softmax_regression, tanh_layers, convolutions, autoencoder, regression, linear_regression,
        tumours, wines, gru, lstm, attention, bigrams, fine_tuning, frozen_body,
    )
}  # fmt: skip


# -- faults ----------------------------------------------------------------------------------------


def scale_rates(run: Run, factor: float) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= factor


def too_high(run: Run) -> None:
    scale_rates(run, 100.0)
    run.clip = None
    run.rate = lambda done: 1.0


def too_low(run: Run) -> None:
    scale_rates(run, 1e-3)


def ends_early(run: Run) -> None:
    run.rate = lambda done: cosine(min(1.0, done / 0.4))


def warms_up_for_ever(run: Run) -> None:
    run.rate = lambda done: done + 0.001


def never_clears(run: Run) -> None:
    run.clear, run.clip = False, None


def optimizes_a_copy(run: Run) -> None:
    copies = [nn.Parameter(p.detach().clone()) for p in run.model.parameters()]
    run.optimizer = torch.optim.Adam(copies, lr=1e-3)


def has_a_nan(run: Run) -> None:
    run.train[0][7, 3] = math.nan


def shuffles_labels(run: Run) -> None:
    for pair in (run.train, run.held):
        pair[1][:] = pair[1][torch.randperm(len(pair[1]))]


def has_no_order(run: Run) -> None:
    order = run.train[1].argsort(stable=True)
    run.train = (run.train[0][order], run.train[1][order])
    run.shuffle, run.epochs = False, max(run.epochs, 8)


def knows_by_heart(run: Run) -> None:
    few = max(24, len(run.train[0]) // 40)
    run.train = (run.train[0][:few], run.train[1][:few])
    run.epochs, run.batch = 120, 8
    run.rate = lambda done: 1.0


def evaluates_otherwise(run: Run) -> None:
    run.held = (run.held[0].flip(-1).roll(5, -1), run.held[1])


def softmax_first(run: Run) -> None:
    run.loss = lambda model, x, y: F.cross_entropy(model(x).softmax(-1), y)
    run.epochs *= 2


def looks_ahead(run: Run) -> None:
    run.model.is_causal = False


def has_a_bad_batch(run: Run) -> None:
    loss, calls, total = run.loss, [0], run.epochs * math.ceil(len(run.train[0]) / run.batch)

    def sometimes(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        calls[0] += model.training
        if model.training and calls[0] == int(0.7 * total):
            return loss(model, -inputs, targets)
        return loss(model, inputs, targets)

    run.loss = sometimes


def divides_by_zero(run: Run) -> None:
    loss, calls, total = run.loss, [0], run.epochs * math.ceil(len(run.train[0]) / run.batch)

    def broken(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        calls[0] += model.training
        late = calls[0] > 0.6 * total
        return loss(model, inputs, targets) + ((0.0 * model(inputs).sum()).sqrt() if late else 0.0)

    run.loss = broken


FAULTS: dict[str, tuple[Callable[[Run], None], tuple[str, ...]]] = {
    "rate-too-high": (too_high, ("softmax_regression", "convolutions", "gru", "attention")),
    "rate-too-low": (too_low, ("tanh_layers", "autoencoder", "regression", "gru")),
    "schedule-ends-early": (ends_early, ("tanh_layers", "attention", "wines")),
    "warmup-too-long": (warms_up_for_ever, ("convolutions", "lstm", "tumours")),
    "gradients-not-cleared": (never_clears, ("tanh_layers", "autoencoder", "attention")),
    "weights-do-not-move": (optimizes_a_copy, ("tanh_layers", "gru", "wines")),
    "non-finite-data": (has_a_nan, ("tanh_layers", "regression", "autoencoder")),
    "labels-unrelated": (shuffles_labels, ("tanh_layers", "convolutions", "softmax_regression")),
    "data-not-shuffled": (has_no_order, ("tanh_layers", "convolutions", "softmax_regression")),
    "overfitting": (knows_by_heart, ("tanh_layers", "gru", "attention", "regression")),
    "validation-differs": (evaluates_otherwise, ("tanh_layers", "convolutions", "tumours")),
    "wrong-loss": (softmax_first, ("tanh_layers", "convolutions", "wines")),
    "target-leaks": (looks_ahead, ("attention",)),
    "bad-batch": (has_a_bad_batch, ("tanh_layers", "regression", "tumours")),
    "non-finite-loss-function": (divides_by_zero, ("tanh_layers", "autoencoder", "gru")),
}
HEALTHY = "healthy"


def made(kind: str, seed: int, fault: Callable[[Run], None] | None = None) -> list[dict[str, Any]]:
    """The rows of one run."""
    torch.manual_seed(seed)
    run = KINDS[kind](seed)
    run.draw = np.random.default_rng(seed)
    if fault is not None:
        fault(run)
    return fit(run)


def write(rows: list[dict[str, Any]], path: Path) -> Path:
    """As CSV; what a row does not hold is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def all_runs(folder: Path, seeds: tuple[int, ...] = (11, 12)) -> Iterator[tuple[str, Path]]:
    """Every run: what is wrong with it, and its log."""
    for slug, (fault, kinds) in FAULTS.items():
        for kind in kinds:
            yield slug, write(made(kind, seeds[0], fault), folder / f"{slug}__{kind}.csv")
    for kind in KINDS:
        for seed in seeds:
            path = folder / f"{HEALTHY}__{kind}__{seed}.csv"
            yield HEALTHY, write(made(kind, seed), path)
