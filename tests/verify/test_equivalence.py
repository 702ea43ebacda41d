"""`surefoot check RECIPE --only equivalence`: equal ways pass, and what breaks them is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.cli import main as command
from surefoot.core.errors import EXIT_DONE, EXIT_FOUND, EXIT_REQUEST
from surefoot.verify.equivalence import Way, compare
from surefoot.verify.window_numbers import (
    AskedWindow,
    NarrowestType,
    PassedWindow,
    make_exact,
    pass_window,
    read_passed,
)

Capture = pytest.CaptureFixture[str]
OWN_CODE = """
import torch
from torch import nn

class Regressor(nn.Module):
    def __init__(self, mixes=False, draws=False):
        super().__init__()
        self.first = nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)
        self.mixes, self.draws = mixes, draws

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs))
        if self.mixes:
            hidden = hidden - hidden.mean(dim=0)
        if self.draws:
            hidden = hidden + torch.randn_like(hidden)
        return self.last(hidden)
"""
RECIPE = """
name: own
model: {kind: custom, target: "own_code:Regressor", arguments: %s}
data: {kind: diabetes}
task: {kind: regression}
train: {horizon: 20 steps, micro_batch: 8, accumulation: 2}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    for name, arguments in (
        ("plain", "{}"),
        ("mixes", "{mixes: true}"),
        ("draws", "{draws: true}"),
    ):
        (tmp_path / f"{name}.yaml").write_text(RECIPE % arguments)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(recipe: str, capsys: Capture, *options: str) -> tuple[int, dict[str, Any]]:
    code = command.invoke(["check", recipe, "--only", "equivalence", "--json", "-", *options])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, answer


def test_a_model_of_ones_own_is_the_same_however_its_window_is_split(
    own: Path, capsys: Capture
) -> None:
    code, told = check("plain.yaml", capsys, "--against", "accumulation", "--against", "recompute")
    answer = told["checks"]["equivalence"]
    assert code == EXIT_DONE and answer["passed"]
    assert answer["computed_in"] == "float64" and answer["samples"] == 16
    assert answer["compared_in_evaluation_mode"] == ["BatchNorm1d"]
    split, recomputed = answer["ways"]
    assert split["first_broken"] is None and split["largest_difference"] < 1e-12
    # It has no repeated layers, and the recipe asks for no recomputing: said, and no failure.
    assert "no repeated layers" in recomputed["not_compared"]


def test_a_forward_that_mixes_samples_breaks_at_its_first_parameter(
    own: Path, capsys: Capture
) -> None:
    code, told = check("mixes.yaml", capsys, "--against", "accumulation")
    (split,) = told["checks"]["equivalence"]["ways"]
    assert code == EXIT_FOUND and not told["passed"]
    assert split["first_broken"] == "first.weight"
    assert split["largest_difference"] > 1e-6


def test_a_forward_that_draws_by_itself_cannot_be_compared(own: Path, capsys: Capture) -> None:
    code, told = check("draws.yaml", capsys, "--against", "accumulation")
    assert code == EXIT_REQUEST
    assert "draws random numbers" in told["error"]["what"]


def test_a_way_that_is_none_is_refused(own: Path, capsys: Capture) -> None:
    code, told = check("plain.yaml", capsys, "--against", "prayer")
    assert code == EXIT_REQUEST and "accumulation" in told["error"]["rule"]


def write_gpt(own: Path, experts: str) -> None:
    (own / "gpt.yaml").write_text(
        f"""
name: small
model: {{kind: gpt, num_layers: 2, num_heads: 4, embedding_dim: 16, feedforward_dim: 24,
  tied: false, experts: {experts}}}
data: {{kind: text, source: files, path: texts, vocabulary_size: 280, sequence_length: 16}}
task: {{kind: generation}}
train: {{horizon: 20 steps, micro_batch: 2}}
"""
    )
    texts = own / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"text number {number} and what it says\n" * 30)


@pytest.mark.ranks_full
@pytest.mark.parametrize("layout", ["replicate", "shard", "tensor", "expert"])
def test_a_layout_is_compared_with_one_process(own: Path, capsys: Capture, layout: str) -> None:
    write_gpt(own, "{num_experts: 4}" if layout == "expert" else "none")
    override = f"parallel.{layout}=2"
    code, told = check("gpt.yaml", capsys, "--against", "layout", "--nproc", "2", "--set", override)
    assert code == EXIT_DONE, told
    (way,) = told["checks"]["equivalence"]["ways"]
    assert way["first_broken"] is None and way["how"] == "2 ranks"


def test_a_term_that_is_declared_to_depend_on_the_split_is_left_out(own: Path) -> None:
    found = []
    for number, (micro_batch, weight) in enumerate([(2, 0.01), (1, 0.01), (2, 7.0)]):
        write_gpt(own, f"{{num_experts: 4, balance_weight: {weight}}}")
        folder = own / f"window-{number}"
        folder.mkdir()
        splits = (f"train.micro_batch={micro_batch}", f"train.accumulation={2 // micro_batch}")
        pass_window(AskedWindow("gpt.yaml", (*splits, "log.console=off"), str(folder)))
        found.append(read_passed(folder))
    plain, split, weighted = found
    assert list(plain.left_out) == ["balance"]
    for other in (split, weighted):
        assert compare(Way.ACCUMULATION, "", plain, other, 1e-10).first_broken is None


def passed(**gradients: list[float]) -> PassedWindow:
    tensors = {name: torch.tensor(g, dtype=torch.float64) for name, g in gradients.items()}
    return PassedWindow(2.0, (1, 2), tensors, tuple(tensors), "float64", ())


PLAIN = passed(a=[3.0, 4.0], b=[1.0, 0.0])


def test_the_first_broken_tensor_is_named_and_the_worst_too() -> None:
    other = passed(a=[3.0, 4.001], b=[1.0, 0.1])
    found = compare(Way.COMPILE, "", PLAIN, other, 1e-5)
    assert found.first_broken == "a" and found.of == "b"
    assert found.largest_difference == pytest.approx(0.1)
    assert compare(Way.COMPILE, "", PLAIN, PLAIN, 1e-10).first_broken is None


@pytest.mark.parametrize("gradients", [{"a": [3.0, math.nan], "b": [1.0, 0.0]}, {"b": [1.0, 0.0]}])
def test_a_missing_or_nan_gradient_is_a_difference(gradients: dict[str, list[float]]) -> None:
    assert compare(Way.COMPILE, "", PLAIN, passed(**gradients), 1e-5).first_broken == "a"


def test_another_loss_and_other_samples_are_differences() -> None:
    loss = PassedWindow(2.1, (1, 2), PLAIN.gradients, PLAIN.names, "float64", ())
    assert compare(Way.COMPILE, "", PLAIN, loss, 1e-5).first_broken == "loss"
    samples = PassedWindow(2.0, (1, 3), PLAIN.gradients, PLAIN.names, "float64", ())
    assert compare(Way.LAYOUT, "", PLAIN, samples, 1e-5).first_broken == "samples"


def test_a_gradient_that_cancels_counts_as_part_of_the_whole() -> None:
    ours, theirs = passed(a=[3.0, 4.0], b=[1e-16, 0.0]), passed(a=[3.0, 4.0], b=[-1e-16, 0.0])
    assert compare(Way.COMPILE, "", ours, theirs, 1e-10).first_broken is None


def test_a_model_that_turns_to_float32_is_noticed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    assert make_exact(model) == ("Dropout",)
    with NarrowestType() as types:
        model(torch.randn(3, 2)).sum().backward()
    assert types.dtype is torch.float64
    with NarrowestType() as types:
        model(torch.randn(3, 2)).float().sum().backward()
    assert types.dtype is torch.float32


def test_what_watches_an_evaluation_does_not_stand_in_the_way(own: Path, capsys: Capture) -> None:
    code, told = check("diabetes-mlp", capsys, "--against", "accumulation")
    assert code == EXIT_DONE and told["passed"]
    plateau = RECIPE % "{}" + "schedule: {kind: plateau}\nearly_stopping: {kind: 'on'}\n"
    (own / "plateau.yaml").write_text(plateau)
    code, told = check("plateau.yaml", capsys, "--against", "accumulation")
    assert code == EXIT_DONE and told["passed"]
