"""A compiled model trains, saves and resumes on a CPU; its checkpoint is that of the bare model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.build import load
from surefoot.observe.metrics_log import read_rows
from surefoot.observe.metrics_schema import deterministic
from surefoot.state.checkpoint import list_checkpoints, read_checkpoint
from surefoot.state.run_state import weights_of
from surefoot.trainer import Trainer
from surefoot.verify.state_hash import checkpoint_hash

pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="torch compiles with a c++"),
    # Of torch's own, while its compiler is loaded.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

INPUTS = torch.arange(96.0).reshape(24, 4) / 96


class Network(nn.Module):
    """Counts the forwards that run as Python."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.num_interpreted = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.num_interpreted += 1
        out: torch.Tensor = self.last(nn.functional.gelu(self.first(values)))
        return out


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def trained(
    runs: Path, model: Network, compiled: str, steps: int, resume: Path | None = None
) -> Path:
    settings = {
        "train": {"horizon": f"{steps} steps", "micro_batch": 8, "compile": compiled},
        "schedule": {"kind": "constant"},
        "checkpoint": {"every": "2 steps"},
        "log": {"console": "off"},
        "device": "cpu",
    }
    data = (INPUTS, INPUTS.sum(1, keepdim=True))
    folder = Trainer(model, data, squared_error, settings=settings, runs=runs).fit(resume).folder
    assert folder is not None
    return folder


def losses(folder: Path) -> list[dict[str, Any]]:
    return [deterministic(row) for row in read_rows(folder / "metrics.jsonl")]


def test_a_compiled_run_is_saved_as_the_bare_model_and_resumed_to_the_bit(tmp_path: Path) -> None:
    model = Network()
    whole = trained(tmp_path / "whole", model, "whole", 4)
    last = list_checkpoints(whole / "checkpoints")[-1]
    assert set(weights_of(read_checkpoint(last)[1])) == set(Network().state_dict())
    loaded = load(whole, model=Network()).model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())

    part = trained(tmp_path / "part", Network(), "whole", 2)
    trained(tmp_path / "part", Network(), "whole", 4, resume=part)
    assert losses(part) == losses(whole)
    assert checkpoint_hash(list_checkpoints(part / "checkpoints")[-1]) == checkpoint_hash(last)


def test_a_compiled_run_computes_what_a_bare_one_does(tmp_path: Path) -> None:
    compiled, bare = Network(), Network()
    ours = losses(trained(tmp_path / "compiled", compiled, "whole", 3))
    theirs = losses(trained(tmp_path / "bare", bare, "off", 3))
    for mine, other in zip(ours, theirs, strict=True):
        if mine["row"] == "step":
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
    # The forward of each update, and no more: the check of the loss before them is interpreted.
    assert bare.num_interpreted - compiled.num_interpreted == 3
