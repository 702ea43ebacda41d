"""State splits into tensors and JSON and comes back the same; anything else is refused by name."""

from __future__ import annotations

import json
import math

import pytest
import torch

from surefoot.core.errors import CheckpointError
from surefoot.state.tree import Snapshot, join_tree, split_tree

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


@pytest.mark.parametrize("key", [1, "$tensor", None])
def test_keys_are_plain_strings(key: object) -> None:
    with pytest.raises(CheckpointError, match="key"):
        split_tree({"user": {key: 1}})
