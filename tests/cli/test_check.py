"""`surefoot check RECIPE --only resume`: what passes, what fails, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_FOUND, EXIT_REQUEST

Capture = pytest.CaptureFixture[str]
OWN_CODE = """
import torch

class Forgetful(torch.nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)
        self.keeps = keeps
        self.calls = 0
        if keeps:
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        if self.keeps:
            self.seen += self.training
            calls = int(self.seen)
        else:
            self.calls += self.training
            calls = self.calls
        return self.layer(inputs) * (1 + 0.01 * calls)
"""
RECIPE = """
name: own
model: {kind: custom, target: "own_code:Forgetful", arguments: {keeps: %s}}
data: {kind: diabetes}
task: {kind: regression}
train: {horizon: 20 steps, micro_batch: 32}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    (tmp_path / "keeps.yaml").write_text(RECIPE % "true")
    (tmp_path / "forgets.yaml").write_text(RECIPE % "false")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(recipe: str, capsys: Capture, *options: str) -> tuple[int, dict[str, Any]]:
    code = command.invoke(["check", recipe, "--only", "resume", "--json", "-", *options])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, answer["checks"]["resume"] if "checks" in answer else answer


def test_state_that_is_kept_passes_and_leaves_no_trace(own: Path, capsys: Capture) -> None:
    before = sorted(own.rglob("*.yaml"))
    code, answer = check("keeps.yaml", capsys, "--kills", "2", "--updates", "8")
    assert code == EXIT_DONE and answer["passed"] and answer["tier"] == "T0"
    assert answer["updates"] == 8 and 1 <= len(answer["kills"]) <= 2
    assert answer["states_compared"] > 8
    assert sorted(own.rglob("*.yaml")) == before


def test_state_that_no_checkpoint_holds_is_found_and_the_update_named(
    own: Path, capsys: Capture
) -> None:
    out = own / "kept"
    options = ("--kills", "1", "--updates", "8", "--seed", "1", "--out", str(out))
    code, answer = check("forgets.yaml", capsys, *options)
    assert code == EXIT_FOUND and answer["tier"] is None
    (kill,) = answer["kills"]
    found = answer["difference"]
    # The restored state is equal; the first update from it is not.
    assert found["window"] == kill["resumed_at"] + 1
    assert "model/layer.weight" in found["pieces"]
    assert "sample ids" not in found["pieces"]
    assert (out / "whole" / "config.yaml").is_file() and (out / "killed").is_dir()


def test_a_training_that_fails_by_itself_is_not_a_failed_proof(own: Path, capsys: Capture) -> None:
    code, answer = check("keeps.yaml", capsys, "--set", "model.target=own_code:Missing")
    assert code == EXIT_FAILED
    assert "failed without any kill" in answer["error"]["what"]
    assert "Missing" in answer["error"]["what"]


@pytest.mark.parametrize(
    "options", [[], ["--only", "overfit-batch"], ["--only", "resume", "--out", "."]]
)
def test_what_is_not_there_is_refused(own: Path, options: list[str], capsys: Capture) -> None:
    assert command.invoke(["check", "keeps.yaml", *options]) == EXIT_REQUEST
    assert "do:" in capsys.readouterr().err


def test_a_run_too_short_to_be_killed_is_refused(own: Path, capsys: Capture) -> None:
    code, answer = check("keeps.yaml", capsys, "--set", "train.horizon=3 steps")
    assert code == EXIT_REQUEST and "ends after" in answer["error"]["what"]
