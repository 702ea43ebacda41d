"""State splits into tensors and JSON and comes back the same; anything else is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parameter import UninitializedBuffer

from surefoot.core.errors import CheckpointError
from surefoot.state.checkpoint import read_checkpoint, write_checkpoint
from surefoot.state.tree import MAX_NESTING_LEVELS, Snapshot, join_tree, split_tree, tensors_named

STATE = {
    "progress": {"step": 3, "loss": math.inf, "names": ["a", "b"], "betas": (0.9, 0.95)},
    "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0)},
    "nothing": None,
    "flag": True,
}


def test_round_trip_through_json() -> None:
    snapshot = split_tree(STATE)
    values = json.loads(json.dumps(snapshot.values, allow_nan=False))
    back = join_tree(Snapshot(snapshot.tensors, values))
    assert torch.equal(back["model"].pop("w"), STATE["model"]["w"])
    assert back["model"].pop("b").shape == (0,)
    assert back["progress"] == STATE["progress"]
    assert back["nothing"] is None and back["flag"] is True


def test_every_float_survives_to_the_bit() -> None:
    for value in (0.1, 1e-310, -0.0, 2**53 + 1.0, math.nan, -math.inf):
        snapshot = split_tree({"x": value})
        back = join_tree(Snapshot({}, json.loads(json.dumps(snapshot.values))))["x"]
        assert repr(back) == repr(value)


def test_tied_weights_are_kept_once_and_come_back_as_one() -> None:
    weight = torch.randn(4, 2)
    snapshot = split_tree({"model": {"head": weight, "embedding": weight}})
    assert list(snapshot.tensors) == ["model/head"]
    back = join_tree(snapshot)
    assert back["model"]["head"] is back["model"]["embedding"]


def test_a_transposed_view_is_not_mistaken_for_its_base() -> None:
    weight = torch.randn(3, 3)
    back = join_tree(split_tree({"a": weight, "b": weight.T}))
    assert torch.equal(back["a"], weight) and torch.equal(back["b"], weight.T)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", lambda: 0])
def test_what_is_not_json_is_refused_by_name(value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        split_tree({"user": {"deep": [1, value]}})
    assert caught.value.where == "user/deep/1"


@pytest.mark.parametrize("key", [1, None, ("a",)])
def test_keys_are_strings(key: object) -> None:
    with pytest.raises(CheckpointError, match="key"):
        split_tree({"user": {key: 1}})


ALIKE = {
    "slash": {"u": {"a": {"b": torch.ones(2)}, "a/b": torch.zeros(2)}},
    "list": {"u": {"a": [torch.ones(2)], "a/0": torch.zeros(2)}},
    "tuple": {"u": {"a": (torch.ones(2),), "a/0": torch.zeros(2)}},
    "empty": {"": {"x": torch.ones(2)}, "x": torch.zeros(2)},
    "leading slash": {"/x": torch.ones(2), "x": torch.zeros(2)},
    "escape": {"a/b": torch.ones(2), "a~1b": torch.zeros(2), "a~01b": torch.full((2,), 2.0)},
    "surrogate": {"\ud800": torch.ones(2), "~d800": torch.zeros(2)},
    "marks": {"u": {"$tensor": torch.ones(2)}, "$$": {"$float": "nan"}, "$": torch.zeros(2)},
}


@pytest.mark.parametrize("state", ALIKE.values(), ids=list(ALIKE))
def test_no_two_tensors_have_one_name(tmp_path: Path, state: dict[str, Any]) -> None:
    snapshot = split_tree({"user": state})
    assert set(tensors_named(snapshot.values)) == set(snapshot.tensors)
    back = read_checkpoint(write_checkpoint(tmp_path, 1, snapshot, {}))[1]
    assert repr(join_tree(back)) == repr({"user": state})
    assert repr(join_tree(split_tree(state))) == repr(state)


class Loud(str):
    def __str__(self) -> str:
        return "always the same"

    __format__ = object.__format__


def test_a_key_is_its_letters_however_its_class_prints_them() -> None:
    snapshot = split_tree({Loud("a"): torch.ones(1), Loud("b"): torch.zeros(1)})
    assert {name: float(t) for name, t in snapshot.tensors.items()} == {"a": 1.0, "b": 0.0}


def test_a_name_written_before_slashes_were_escaped_is_read() -> None:
    before = Snapshot({"u/a/b": torch.ones(1)}, {"u": {"a/b": {"$tensor": "u/a/b"}}})
    assert float(join_tree(before)["u"]["a/b"]) == 1.0


def test_tensors_that_read_the_same_memory_in_two_ways_are_two(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    state = {"m": {"a": number, "conjugate": number.conj(), "again": number.conj()}}
    state["m"] |= {"imag": number.imag, "negative": number.conj().imag}
    snapshot = split_tree(state)
    assert snapshot.values["m"]["again"] == snapshot.values["m"]["conjugate"]
    back = join_tree(read_checkpoint(write_checkpoint(tmp_path, 1, snapshot, {}))[1])["m"]
    assert all(torch.equal(back[name], value.resolve_conj()) for name, value in state["m"].items())


def test_one_element_of_any_stride_is_written(tmp_path: Path) -> None:
    state = {"m": {"one": torch.arange(3.0)[1::2], "none": torch.arange(4.0)[2:2:2]}}
    back = join_tree(read_checkpoint(write_checkpoint(tmp_path, 1, split_tree(state), {}))[1])
    assert back["m"]["one"].tolist() == [1.0] and back["m"]["none"].shape == (0,)


class Wrapper(torch.Tensor):
    """One that holds others and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> torch.Tensor:
        return Wrapper(torch.ones(2))


UNWRITABLE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)]),
    "lazy": UninitializedBuffer,
    "meta": lambda: torch.ones(2, device="meta"),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "wrapper": lambda: Wrapper(torch.ones(2)),
    "deep": lambda: reduce(lambda inner, _: [inner], range(3000), 1),
    "huge": lambda: 10**5000,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", UNWRITABLE.values(), ids=list(UNWRITABLE))
def test_what_cannot_be_written_is_refused_before_anything_is(make: Callable[[], Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        split_tree({"user": {"piece": [make()]}})
    assert caught.value.where.startswith("user/piece/0")


def test_what_is_deep_and_large_but_allowed_comes_back(tmp_path: Path) -> None:
    state = {
        "deep": reduce(lambda inner, _: [inner], range(MAX_NESTING_LEVELS - 2), 1),
        "large": 10**4200,
    }
    back = join_tree(read_checkpoint(write_checkpoint(tmp_path, 1, split_tree(state), {}))[1])
    assert back == state
