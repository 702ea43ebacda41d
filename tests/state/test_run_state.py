"""The state of a run: what is compared with the model, and how sharded tensors are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.core.errors import CheckpointError
from surefoot.state import run_state as module
from surefoot.state.reading import StoredTensors
from surefoot.state.run_state import RunState, check_same_tensors
from surefoot.state.tree import Snapshot, split_tree


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


FORMS = (None, 0, 3, 0.5, "text", {"a": 1}, torch.ones(2), torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("name", ["_extra_state", "layers.0._extra_state"])
@pytest.mark.parametrize("ours", FORMS)
def test_the_form_of_an_extra_state_is_the_module_s_own_business(name: str, ours: Any) -> None:
    for theirs in FORMS:
        check_same_tensors({name: ours}, {name: theirs})
    for ours_only, theirs_only in (({name: ours}, {}), ({}, {name: ours})):
        with pytest.raises(CheckpointError, match="another model"):
            check_same_tensors(ours_only, theirs_only)


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2).double(), 1])
def test_what_is_no_extra_state_is_compared(value: Any) -> None:
    ours = {"my_extra_state": torch.ones(2), "hook": None}
    check_same_tensors(ours, {"my_extra_state": torch.zeros(2), "hook": 3})
    with pytest.raises(CheckpointError) as caught:
        check_same_tensors(ours, {"my_extra_state": value, "hook": None})
    assert caught.value.where.startswith("my_extra_state: checkpoint ")


@pytest.mark.parametrize("part", ["optimizer", *module.PARTS_BY_STATE_DICT])
def test_what_a_part_refuses_leaves_the_weights_and_the_count_as_they_are(part: str) -> None:
    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def load_state_dict(self, saved: object) -> None:
            if self.name == part:
                raise CheckpointError(f"{part} refuses")

        load_state_by_name = load_state_dict

    class Count(Part):
        loaded = False

        def load_state_dict(self, saved: object) -> None:
            super().load_state_dict(saved)
            self.loaded = True

    model = nn.Linear(2, 1)
    parts: Any = {name: Part(name) for name in ("optimizer", *module.PARTS_BY_STATE_DICT)}
    parts["progress"] = progress = Count("progress")
    state = replace(run_state(model), **parts)
    before = model.weight.detach().clone()
    other = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    saved = split_tree(
        {"model": other, "optimizer": {}, **dict.fromkeys(module.PARTS_BY_STATE_DICT)}
    )
    with pytest.raises(CheckpointError, match="refuses"):
        state.restore(saved)
    assert torch.equal(model.weight, before) and not progress.loaded
