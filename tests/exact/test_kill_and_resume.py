"""A run that is killed at any update and resumed is the run that was not: rows, samples, state."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from forked import run_forked
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.state.checkpoint import list_checkpoints
from surefoot.verify.state_hash import checkpoint_hash

PROGRAM = Path(__file__).with_name("killed_run.py")
SMALL_GPT = [
    "model.num_layers=1",
    "model.embedding_dim=16",
    "model.num_heads=2",
    "model.feedforward_dim=32",
    "model.dropout=0.1",
    "data.source=files",
    "data.pattern='*.py'",
    "data.vocabulary_size=257",
    "data.sequence_length=32",
    "train.accumulation=2",
    "train.micro_batch=4",
]
RECIPES: dict[str, list[str]] = {
    "stdlib-gpt": SMALL_GPT,
    "digits-cnn": ["model.widths=[4]", "train.micro_batch=128", "loader.workers=1"],
    "diabetes-mlp": ["train.accumulation=2", "evaluate.weights=ema"],
}
COMMON = ["checkpoint.every=4 steps", "evaluate.every=3 steps", "ema.kind=on"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few small source files: an epoch of about ten updates."""
    folder = tmp_path_factory.mktemp("corpus")
    source = PROGRAM.read_text(encoding="utf-8")
    for number in range(4):
        (folder / f"module_{number}.py").write_text(f"# file {number}\n{source}", encoding="utf-8")
    return folder


def run(runs: Path, recipe: str, overrides: list[str], resume: str = "-", kill_at: int = 0) -> int:
    arguments = [str(runs), resume, str(kill_at), recipe, *overrides]
    code, printed = run_forked(PROGRAM, *arguments, folder=runs.parent)
    assert code == (-signal.SIGKILL if kill_at else 0), printed
    return code


def only_run(runs: Path) -> Path:
    (folder,) = runs.iterdir()
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [deterministic(row) for row in read_rows(folder / "metrics.jsonl")]


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_killed_and_resumed_run_is_the_uninterrupted_one(
    recipe: str, tmp_path: Path, corpus: Path
) -> None:
    overrides = [*RECIPES[recipe], *COMMON]
    if recipe == "stdlib-gpt":
        overrides.append(f"data.path={corpus}")
    overrides.append("train.horizon=2.5 epochs")
    run(tmp_path / "whole", recipe, overrides)
    whole = only_run(tmp_path / "whole")
    step_rows = [row for row in rows(whole) if row["row"] == "step"]
    assert [row["step"] for row in step_rows] == list(range(1, len(step_rows) + 1))
    assert len({row["epoch"] for row in step_rows}) >= 3, "the run crosses an epoch border"

    last = len(step_rows)
    kills = sorted(random.sample(range(5, last), 2))
    print(f"killed after windows {kills} of {last}")
    run(tmp_path / "killed", recipe, overrides, kill_at=kills[0])
    killed = only_run(tmp_path / "killed")
    run(tmp_path / "killed", recipe, overrides, resume=str(killed), kill_at=kills[1])
    run(tmp_path / "killed", recipe, overrides, resume=str(killed))

    assert rows(killed) == rows(whole)
    ours, theirs = list_checkpoints(killed / "checkpoints"), list_checkpoints(whole / "checkpoints")
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert [checkpoint_hash(path) for path in ours] == [checkpoint_hash(path) for path in theirs]
