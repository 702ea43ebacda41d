"""On a CUDA device: no wait in the hot path, the same numbers after a resume, every precision."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from host_sync import no_host_sync
from surefoot.engine.loop import Loop
from surefoot.models.gpt import GPT, GPTConfig
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.run.folder_run import RunResult
from surefoot.state.checkpoint import list_checkpoints
from surefoot.tasks.generation import GenerationTask
from surefoot.trainer import Trainer
from surefoot.verify.state_hash import checkpoint_hash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY = 64


def train(
    runs: Path, precision: str = "bf16", resume: Path | None = None, **changes: dict[str, Any]
) -> RunResult:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig.llama(
            vocabulary_size=VOCABULARY,
            sequence_length=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            embedding_dim=32,
            dropout=0.1,
        )
    )
    tokens = torch.arange(200)[:, None] + torch.arange(32)
    settings: dict[str, Any] = {
        "device": "cuda",
        "deterministic": True,
        "train": {"horizon": "30 steps", "micro_batch": 8, "accumulation": 2},
        "optimizer": {"lr": 1e-2},
        "precision": {"dtype": precision},
        "evaluate": {"every": "never"},
        "checkpoint": {"every": "10 steps"},
        "log": {"console": "off", "details_every": "7 steps", "layers": ["blocks.*"]},
        "ema": {"kind": "on"},
        "guard": {},
        "memory": {},
    }
    for name, section in changes.items():
        settings[name] = {**settings[name], **section}
    trainer = Trainer(
        model,
        {"input_ids": tokens % VOCABULARY},
        GenerationTask(VOCABULARY),
        settings=settings,
        runs=runs,
    )
    return trainer.fit(resume=resume)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_precision_learns(precision: str, tmp_path: Path) -> None:
    folder = train(tmp_path, precision).folder
    assert folder is not None
    losses = [row["loss"] for row in read_rows(folder / "metrics.jsonl") if row["applied"]]
    assert losses[-1] < 0.5 * losses[0]  # type: ignore[operator]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"guard": {"spikes": "log"}},
        {"guard": {"spikes": "skip"}},
        {"memory": {"offload_optimizer": "cpu", "offload_parameters": "cpu"}},
    ],
    ids=["log", "skip", "state and weights on the host"],
)
def test_the_hot_path_waits_for_nothing(
    precision: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only wait is that for the event of the update before, which this mode does not count."""
    run = Loop.run

    def guarded(self: Loop) -> Any:
        update = self.parts.update

        def watched(window: Any) -> None:
            # The first updates load kernels and make handles, which waits.
            is_warm = self.parts.progress.window >= 5
            with no_host_sync() if is_warm else nullcontext():
                update(window)

        object.__setattr__(self.parts, "update", watched)
        return run(self)

    monkeypatch.setattr(Loop, "run", guarded)
    done = train(tmp_path, precision, checkpoint={"every": "end"}, **changes)
    assert done.step >= 25


def test_a_killed_run_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path / "whole").folder
    assert whole is not None
    settle = Loop._at_boundary

    def dies(self: Loop, before: Any, now: Any) -> Any:
        end = settle(self, before, now)
        if now.step == 20:
            raise RuntimeError("killed")
        return end

    monkeypatch.setattr(Loop, "_at_boundary", dies)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "killed")
    monkeypatch.undo()
    (killed,) = (tmp_path / "killed").iterdir()
    train(tmp_path / "killed", resume=killed)
    rows = [[deterministic(row) for row in read_rows(f / "metrics.jsonl")] for f in (whole, killed)]
    assert rows[0] == rows[1]
    hashes = [
        [checkpoint_hash(path) for path in list_checkpoints(f / "checkpoints")]
        for f in (whole, killed)
    ]
    assert hashes[0] == hashes[1]


def test_the_time_of_sampled_updates_on_the_device_is_in_the_ledger(tmp_path: Path) -> None:
    folder = train(tmp_path).folder
    assert folder is not None
    ledger = json.loads((folder / "artifacts" / "time-ledger.json").read_text())
    (stretch,) = ledger["stretches"]
    phases = stretch["device_milliseconds"]
    assert phases.keys() == {"forward", "backward", "norm and clip", "optimizer", "between"}
    assert all(milliseconds > 0 for milliseconds in phases.values())
    details = [row["details"] for row in read_rows(folder / "metrics.jsonl") if row["details"]]
    assert len(details) >= 4 and all("update_ratio" in found for found in details)  # type: ignore[operator]
