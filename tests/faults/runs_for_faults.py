"""Tiny runs that the tests of faults break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot import Trainer
from surefoot.run.folder_run import RunResult
from surefoot.state.manifest import MANIFEST_NAME, seal

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(20, 3, generator=GENERATOR)
TARGETS = torch.randn(20, 1, generator=GENERATOR)
LABELS = torch.randint(0, 3, (20,), generator=GENERATOR)


def squared_error_sum(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).pow(2).sum()


def settings(**sections: dict[str, Any]) -> dict[str, Any]:
    """A run of 6 updates that evaluates and saves every 3."""
    made: dict[str, dict[str, Any]] = {
        "train": {"horizon": "6 steps", "micro_batch": 4},
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "schedule": {"kind": "constant"},
        "evaluate": {"every": "3 steps"},
        "checkpoint": {"every": "3 steps"},
        "log": {"console": "off"},
    }
    for name, section in sections.items():
        same_kind = section.get("kind") in (None, made.get(name, {}).get("kind"))
        made[name] = {**made.get(name, {}), **section} if same_kind else section
    return made


def fit(
    runs: Path,
    model: nn.Module | None = None,
    data: Any = (INPUTS, TARGETS),
    task: Any = squared_error_sum,
    *,
    validation: Any = None,
    metrics: Any = None,
    resume: Path | None = None,
    accept: tuple[str, ...] = (),
    **sections: dict[str, Any],
) -> RunResult:
    """Trains a linear layer, or what is given."""
    trainer = Trainer(
        nn.Linear(3, 1) if model is None else model,
        data,
        task,
        validation=validation,
        metrics=metrics,
        settings=settings(**sections),
        runs=runs,
    )
    return trainer.fit(resume=resume, accept=accept)


def edit_json(path: Path, change: Any) -> None:
    """Applies `change` to the JSON value in a file; a manifest gets the digest that fits."""
    value = json.loads(path.read_text("utf-8"))
    changed = change(value)
    written = value if changed is None else changed
    is_manifest = path.name == MANIFEST_NAME and isinstance(written, dict)
    path.write_text(seal(written) if is_manifest else json.dumps(written), "utf-8")
