"""State that no checkpoint can hold is found before the first update; any other is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.assembly.checks import check_keepable
from surefoot.assembly.run_parts import Assembly
from surefoot.build import run_recipe
from surefoot.config.load import load_recipe
from surefoot.core.errors import CheckpointError

INPUTS = torch.arange(64.0).reshape(16, 4) / 64
DATA = (INPUTS, torch.arange(16) % 3)
SETTINGS: dict[str, Any] = {
    "train": {"horizon": "4 steps", "micro_batch": 4},
    "log": {"console": "off"},
    "device": "cpu",
}


class Keeping(nn.Linear):
    """A layer that keeps something besides its weights."""

    def __init__(self, kept: Any = None, grows: bool = False) -> None:
        super().__init__(4, 3)
        self.kept, self.grows, self.calls = kept, grows, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.grows and self.training:
            self.kept = {"a/b": torch.ones(self.calls), "$calls": self.calls}
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def holding(buffer: Tensor) -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_buffer("held", buffer)
    return model


def trainer(model: nn.Module, runs: Path, horizon: str = "4 steps") -> surefoot.Trainer:
    settings = {**SETTINGS, "train": {"horizon": horizon, "micro_batch": 4}}
    return surefoot.Trainer(
        model, DATA, surefoot.ClassificationTask(3), settings=settings, runs=runs
    )


@pytest.mark.parametrize(
    ("model", "piece"),
    [
        (Keeping({1}), "model/_extra_state"),
        (Keeping({"deep": [1, b"bytes"]}), "model/_extra_state/deep/1"),
        (Keeping({1: 2}), "model/_extra_state"),
        (Keeping({"a": np.ones(2)}), "model/_extra_state/a"),
        (holding(torch.ones(2, dtype=torch.complex128)), "model/held"),
        (holding(torch.eye(3).to_sparse()), "model/held"),
    ],
)
def test_what_cannot_be_kept_is_named_before_anything_is_made(
    tmp_path: Path, model: nn.Module, piece: str
) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be stored|has a key") as caught:
        trainer(model, tmp_path / "runs").fit()
    assert caught.value.where == piece
    assert not (tmp_path / "runs").exists()


def test_what_changes_its_form_is_kept_and_gone_on_with(tmp_path: Path) -> None:
    """And a state that cannot be stored any more is refused before the resume touches the run."""
    run = trainer(Keeping(grows=True), tmp_path).fit().folder
    assert run is not None
    before = (run / "events.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="set cannot be stored"):
        trainer(Keeping({1}), tmp_path, "6 steps").fit(resume=run, accept=["train.horizon"])
    assert (run / "events.jsonl").read_bytes() == before
    model = Keeping()
    assert trainer(model, tmp_path, "6 steps").fit(resume=run, accept=["train.horizon"]).step == 6
    assert model.kept["$calls"] >= 4 and model.kept["a/b"].shape == (model.kept["$calls"],)
    assert surefoot.load(run, model=Keeping()).model.kept["$calls"] == model.kept["$calls"]


def build_unkeepable() -> nn.Module:
    model = nn.Linear(10, 1)
    model.register_buffer("held", torch.eye(3).to_sparse())
    return model


def test_a_recipe_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_models", sys.modules[__name__])
    own = ["model={kind: custom, target: 'own_models:build_unkeepable'}", "device=cpu"]
    recipe = load_recipe("diabetes-mlp", own)
    for dry_run in (False, True):
        with pytest.raises(CheckpointError, match="sparse") as caught:
            run_recipe(recipe, run_root=tmp_path / "runs", dry_run=dry_run)
        assert caught.value.where == "model/held"
    assert not (tmp_path / "runs").exists()


class TwoRanks:
    """Rank 1 of two: it can keep what rank 0 cannot."""

    def gather(self, what: str, value: Any) -> list[Any]:
        return ["state of type set cannot be stored", value]


def test_what_one_rank_cannot_keep_is_refused_by_all() -> None:
    state = SimpleNamespace(capture=lambda: None)
    parts = SimpleNamespace(
        trainable=SimpleNamespace(state=state), place=SimpleNamespace(ranks=TwoRanks())
    )
    with pytest.raises(CheckpointError, match="set cannot be stored") as caught:
        check_keepable(cast(Assembly, parts))
    assert caught.value.where == "rank 0"
