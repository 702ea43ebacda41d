"""The audit has nothing to say about the library's own recipes, engine and examples."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHORT = ["train.horizon=24 steps", "evaluate.every=8 steps", "checkpoint.every=12 steps"]
ACCUMULATED = ["train.accumulation=2", "train.micro_batch=8"]
RECIPES = {
    "gpt": ["stdlib-gpt", "data.sequence_length=32"],
    "gpt, accumulated": ["stdlib-gpt", "data.sequence_length=32", *ACCUMULATED],
    "gpt, bf16": ["stdlib-gpt", "data.sequence_length=32", "precision.dtype=bf16"],
    "cnn": ["digits-cnn"],
    "cnn, accumulated, averaged": [
        "digits-cnn",
        *ACCUMULATED,
        "ema.kind=on",
        "schedule.warmup=0.1",
    ],
    "mlp": ["diabetes-mlp"],
    "mlp, workers": ["diabetes-mlp", "loader.workers=1", "guard.non_finite=skip"],
}


def audited(folder: Path, *words: str, ranks: int = 1) -> Any:
    answer = folder / "answer.json"
    options = ["--level", "deep", "--json", str(answer), "--nproc", str(ranks)]
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "audit", *options, *words],
        capture_output=True, text=True, timeout=280, cwd=folder,
    )  # fmt: skip
    facts = json.loads(answer.read_text())
    assert facts["exit_code_of_script"] == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert facts["internal_errors"] == []
    return facts


@pytest.mark.parametrize(
    "name",
    [n if n in ("cnn", "mlp") else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES],
)
def test_a_recipe_has_no_finding(tmp_path: Path, name: str) -> None:
    recipe, *changes = RECIPES[name]
    sets = [word for change in (*SHORT, *changes) for word in ("--set", change)]
    facts = audited(tmp_path, "-m", "surefoot", "train", recipe, *sets)
    assert (facts["updates"], facts["findings"]) == (24, [])


@pytest.mark.slow
def test_a_resumed_recipe_has_no_finding(tmp_path: Path) -> None:
    sets = ["--set", "train.horizon=24 steps", "--set", "checkpoint.every=12 steps"]
    begun = [sys.executable, "-m", "surefoot", "train", "diabetes-mlp", *sets]
    subprocess.run(begun, capture_output=True, timeout=200, cwd=tmp_path, check=True)
    (run,) = (tmp_path / "runs").iterdir()
    more = ["--set", "train.horizon=40 steps", "--accept-change", "train.horizon"]
    facts = audited(tmp_path, "-m", "surefoot", "train", "--resume", str(run), *more)
    assert (facts["updates"], facts["findings"]) == (16, [])


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(SCRIPTS)))]
)
def test_a_script_of_the_readme_has_no_finding(tmp_path: Path, number: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[number])
    facts = audited(tmp_path, "script.py")
    assert facts["updates"] >= 20
    assert facts["findings"] == []
