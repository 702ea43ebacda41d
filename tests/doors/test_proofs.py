"""`surefoot check --only resume` proves the state of own parts, and ranks train them alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot.core.errors import EXIT_DONE, EXIT_FOUND
from surefoot.observe.metrics_log import read_rows

RECIPE: dict[str, Any] = {
    "name": "outside",
    "model": {
        "kind": "custom",
        "target": "torch.nn:Linear",
        "arguments": {"in_features": 2, "out_features": 2},
    },
    "data": {"kind": "larger_of_two", "arguments": {"num_samples": 40}},
    "task": {"kind": "margin"},
    "optimizer": {"kind": "sign_descent", "lr": 0.05},
    "schedule": {"kind": "halving"},
    "sampler": {"kind": "every_other"},
    "train": {
        "horizon": "12 steps",
        "micro_batch": 4,
        "accumulation": 2,
        "clip": {"kind": "each_element"},
    },
    "log": {"console": "off"},
}
FORGETFUL = """
import torch
from outside_parts.training import SignDescent


class Forgetful(SignDescent):
    \"\"\"Keeps its age where no checkpoint looks.\"\"\"

    def __init__(self, groups, lr=1e-3):
        super().__init__(groups, lr)
        self.age = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.age += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 0.01 / self.age)
"""


@pytest.fixture
def folder(installed: Path, tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    (tmp_path / "forgetful.py").write_text(FORGETFUL, encoding="utf-8")
    return tmp_path


def surefoot(folder: Path, *words: str) -> tuple[int, str]:
    arguments = [sys.executable, "-m", "surefoot", *words]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


def check_resume(folder: Path, *words: str) -> tuple[int, str]:
    options = ("--only", "resume", "--kills", "1", "--updates", "8", "--seed", "1")
    return surefoot(folder, "check", "recipe.yaml", *options, *words)


def test_a_killed_and_resumed_run_of_own_parts_is_bit_equal(folder: Path) -> None:
    code, said = check_resume(folder)
    assert code == EXIT_DONE, said
    assert "PASS resume, tier T0" in said


def test_an_optimizer_that_forgets_is_found(folder: Path) -> None:
    code, said = check_resume(
        folder, "--set", "optimizer={kind: custom, lr: 0.05, target: forgetful:Forgetful}"
    )
    assert code == EXIT_FOUND, said
    assert "FAIL resume" in said and "model/weight" in said


def test_two_ranks_train_own_parts_as_one(folder: Path) -> None:
    alone = surefoot(folder, "train", "recipe.yaml")
    assert alone[0] == EXIT_DONE, alone[1]
    shared = surefoot(
        folder, "train", "recipe.yaml", "--nproc", "2", "--set", "train.accumulation=1"
    )
    assert shared[0] == EXIT_DONE, shared[1]
    losses = [
        [row["loss"] for row in read_rows(run / "metrics.jsonl") if "grad_norm" in row]
        for run in sorted((folder / "runs").iterdir())
    ]
    assert len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
