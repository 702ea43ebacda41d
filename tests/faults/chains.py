"""Small runs of every kind, killed at will within one process, left and rebuilt.

What a kill leaves on the disk is the same as in a process of its own; what it leaves in memory is
thrown away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.assembly.material import Prepared
from surefoot.assembly.run_parts import Assembly, Material, MicroBatches
from surefoot.config.load import resolve_settings
from surefoot.data.sources.datasets import as_source
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.observe.run_folder import RunFolder
from surefoot.run.folder_run import WatchBatches
from surefoot.run.session import RunHooks, RunRequest, start_run
from surefoot.run.start import ResumeRequest
from surefoot.state.checkpoint import list_checkpoints
from surefoot.state.run_state import RunState
from surefoot.tasks.task import FunctionTask
from surefoot.verify.state_hash import piece_hashes

NUM_SAMPLES = 23
UPDATES = 9
DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(NUM_SAMPLES, 4, generator=DRAW)
TARGETS = torch.randn(NUM_SAMPLES, 1, generator=DRAW)


class Killed(BaseException):
    """The end of an attempt, wherever it was."""


class Normed(nn.Module):
    """Batch norm and dropout: state that no optimizer knows of, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.layers(inputs))


class Attentive(nn.Module):
    """A transformer's block over the four numbers of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.out(self.block(self.embed(inputs.unsqueeze(-1))).mean(1)))


class Convolved(nn.Module):
    """A convolution with group norm, and noise of its own from Python's and NumPy's streams."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.out = nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.conv(inputs.unsqueeze(1))).flatten(1)
        if self.training:
            hidden = hidden * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand()))
        return cast(Tensor, self.out(hidden))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normed": Normed,
    "attentive": Attentive,
    "convolved": Convolved,
}


class Augmented(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples with noise from all three global streams."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return INPUTS[index] + noise, TARGETS[index]


class Streamed:
    """A stream with its own state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.place < NUM_SAMPLES:
            self.place += 1
            yield INPUTS[self.place - 1], TARGETS[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


DATA: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (INPUTS, TARGETS),
    "augmented": Augmented,
    "stream": Streamed,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd", "lr": 0.01, "momentum": 0.9, "nesterov": True},
    "adam": {"kind": "adam", "lr": 1e-2},
    "adamw": {"kind": "adamw", "lr": 1e-2},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"kind": "constant"},
    "cosine": {"kind": "warmup_cosine", "warmup": 2},
    "plateau": {"kind": "plateau", "patience": 1, "factor": 0.5},
}


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).float() - batch[1]).square().sum()


@dataclass(frozen=True)
class Case:
    """One kind of run."""

    model: str = "normed"
    optimizer: str = "adamw"
    data: str = "augmented"
    schedule: str = "plateau"
    accumulation: int = 2
    workers: int = 0
    ema: bool = True
    dtype: str = "fp32"
    save_every: int = 2
    evaluate_every: int = 3
    poisoned: bool = False
    """Whether one sample is not finite, and its update skipped."""

    def settings(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "seed": 3,
            "train": {
                "horizon": f"{UPDATES} steps",
                "micro_batch": 3,
                "accumulation": self.accumulation,
            },
            "optimizer": OPTIMIZERS[self.optimizer],
            "schedule": SCHEDULES[self.schedule],
            "precision": {"dtype": self.dtype},
            "loader": {"workers": 0 if self.data == "stream" else self.workers},
            "evaluate": {
                "every": f"{self.evaluate_every} steps",
                "weights": "ema" if self.ema else "raw",
            },
            "checkpoint": {"every": f"{self.save_every} steps", "keep": 100},
            "ema": {"kind": "on", "decay": 0.8} if self.ema else {"kind": "off"},
            "early_stopping": {"kind": "on", "patience": 50},
            "guard": {
                "restarts_without_progress": 1000,
                "non_finite": "skip" if self.poisoned else "stop",
            },
            "log": {"console": "off"},
        }

    def samples(self) -> Any:
        if not self.poisoned:
            return DATA[self.data]()
        poisoned = INPUTS.clone()
        poisoned[5] = float("nan")
        return poisoned, TARGETS


@dataclass
class Seen:
    """What was seen of all attempts of a run."""

    states: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Windows done, and the hashes of the pieces of the state."""
    ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


def watching(seen: Seen, kill: tuple[int, int] | None) -> WatchBatches:
    """Looks at the run between windows, and kills it within one."""

    def look(state: RunState) -> int:
        seen.states.append((state.progress.window, piece_hashes(state.capture())))
        return state.progress.window

    def watch(batches: MicroBatches, settled_state: Callable[[], RunState]) -> MicroBatches:
        window, position = look(settled_state()), 0
        ids: list[int] = []
        with closing(batches):
            for batch in batches:
                if kill is not None and (window, position) >= kill:
                    raise Killed
                ids.extend(batch.ids)
                position += 1
                yield batch
                if batch.ends_window:
                    window = look(settled_state())
                    known = seen.ids.setdefault(window, tuple(ids))
                    assert known == tuple(ids), f"other samples in window {window}"
                    ids, position = [], 0

    return watch


def attempt(
    case: Case,
    folder: Path,
    seen: Seen,
    kill: tuple[int, int] | None,
    spoil: Callable[[Assembly], None] = lambda assembly: None,
) -> bool:
    """Trains to the end or to the kill `(window, micro-batch)`; says whether it ended.

    It goes on where the folder holds a checkpoint, and begins anew where it does not.
    """
    if folder.exists() and not list_checkpoints(folder / "checkpoints"):
        folder.rename(folder.with_name(f"{folder.name}-{len(seen.states)}"))
    resolved = resolve_settings(case.settings())

    def prepare(resuming: bool) -> Prepared:
        # On a resume every weight is another one until it is restored.
        torch.manual_seed(7 if resuming else 1)
        return Prepared(
            Material(
                MODELS[case.model](),
                FunctionTask(squared_error),
                as_source(case.samples(), "training data"),
                {"validation": as_source((INPUTS[:8], TARGETS[:8]), "validation data")},
            )
        )

    asked = RunRequest(
        "chain",
        resolved,
        prepare,
        make_folder=lambda needed_bytes: RunFolder.create_at(folder),
        resume=ResumeRequest(folder, lambda run: resolved) if folder.exists() else None,
        hooks=RunHooks(on_assembled=spoil, watch_batches=watching(seen, kill)),
    )
    try:
        start_run(asked)
    except Killed:
        return False
    seen.rows = [deterministic(row) for row in read_rows(folder / "metrics.jsonl")]
    return True


def differences(case: Case, folder: Path, kills: list[tuple[int, int]]) -> list[str]:
    """What differs between a run with these kills and the run without; nothing should."""
    whole, chained = Seen(), Seen()
    assert attempt(case, folder / "whole", whole, None)
    for kill in [*sorted(kills), None]:
        if attempt(case, folder / "chained", chained, kill):
            break
    return compare(whole, chained)


def compare(whole: Seen, chained: Seen) -> list[str]:
    """Pieces of the state, samples and rows that differ."""
    expected = dict(whole.states)
    found = [
        f"window {window}: {name}"
        for window, pieces in chained.states
        for name in sorted({*pieces, *expected[window]})
        if pieces.get(name) != expected[window].get(name)
    ]
    if whole.ids != chained.ids:
        found.append("sample ids")
    if whole.rows != chained.rows:
        found.append("rows of the metrics")
    return found
