"""The state of a run: its sharded tensors are found by name in checkpoints of both spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.state import run_state as module
from surefoot.state.reading import StoredTensors
from surefoot.state.run_state import RunState
from surefoot.state.tree import Snapshot


class Recording(StoredTensors):
    """Tensors of shape [2, 2] that say whether they were read whole."""

    def __init__(self) -> None:
        self.whole: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.whole.append(name)
        return torch.zeros(2, 2)

    def shape(self, name: str) -> tuple[int, ...]:
        return (2, 2)


def run_state(model: nn.Module) -> RunState:
    unused: Any = None
    return RunState(module.Progress(), model, *[unused] * 7, device="cpu")


@pytest.mark.parametrize("spelling", ["a~1b~0.weight", "a/b~.weight"])
def test_a_sharded_tensor_is_read_in_part_whatever_its_name(
    monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.setattr(module, "is_sharded", lambda tensor: tensor.ndim == 2)
    monkeypatch.setattr(module, "laid_out_like", lambda live, read: live)
    model = nn.ModuleDict({"a/b~": nn.Linear(2, 2)})
    path = f"model/{spelling}"
    stored = Recording()
    values = {"model": {"a/b~.weight": {"$tensor": path}, "other": {"$tensor": "model/other"}}}
    laid_out = run_state(model)._laid_out(Snapshot(stored, values)).tensors
    assert laid_out[path].data_ptr() == model["a/b~"].weight.data_ptr()
    assert stored.whole == ["model/other"]
