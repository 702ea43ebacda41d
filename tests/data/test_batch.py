"""Batches of every shape reach a device and keep their shape."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError
from surefoot.data.batch import MicroBatch, describe, map_tensors, move_to
from surefoot.data.order import Cursor

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Record:
    tokens: torch.Tensor
    name: str = "record"


class Movable:
    """An object that moves itself, such as a graph."""

    def __init__(self, device: str = "cpu", fails: bool = False) -> None:
        self.device = device
        self.fails = fails

    def to(self, device: Any) -> Movable:
        if self.fails:
            raise ValueError("no")
        return Movable(str(device))


class Encoding(UserDict[str, torch.Tensor]):
    """As a transformers BatchEncoding: a mapping with a `.to` of its own."""

    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.data.items()})


def test_every_container_is_moved_and_kept() -> None:
    batch = {
        "tensor": torch.ones(2),
        "pair": Pair(torch.ones(3), [torch.ones(4), "text"]),
        "record": Record(torch.ones(5)),
        "encoding": Encoding({"input_ids": torch.ones(6)}),
        "graph": Movable(),
        "user": UserDict({"x": torch.ones(7)}),
        "nothing": None,
    }
    moved = move_to(batch, "meta")
    assert moved["tensor"].is_meta and moved["tensor"].shape == (2,)
    assert type(moved["pair"]) is Pair and moved["pair"].left.is_meta
    assert moved["pair"].right[0].is_meta and moved["pair"].right[1] == "text"
    assert type(moved["record"]) is Record and moved["record"].tokens.is_meta
    assert moved["record"].name == "record"
    assert type(moved["encoding"]) is Encoding and moved["encoding"]["input_ids"].is_meta
    assert moved["graph"].device == "meta"
    assert type(moved["user"]) is UserDict and moved["user"]["x"].is_meta
    assert moved["nothing"] is None
    # The batch itself stays where it was.
    assert not batch["tensor"].is_meta and not batch["record"].tokens.is_meta
    assert not batch["user"]["x"].is_meta


def test_what_is_there_already_is_not_copied() -> None:
    tensor = torch.ones(2)
    assert move_to((tensor,), "cpu")[0] is tensor


def test_tensors_and_objects_are_told_apart() -> None:
    graph = Movable()
    assert map_tensors([torch.ones(1), graph], lambda tensor: tensor + 1)[1] is graph


def test_an_object_that_refuses_is_named() -> None:
    with pytest.raises(DataError, match="a Movable could not be moved to meta: no"):
        move_to({"graph": Movable(fails=True)}, "meta")


def test_descriptions_are_short_and_tell_shapes() -> None:
    batch = {"x": torch.ones(2, 3), "y": (np.zeros(4, dtype=np.int32), "text", None)}
    assert describe(batch) == "{x: float32[2, 3], y: (int32[4], str of 4, NoneType)}"
    assert describe([1] * 20) == "(" + "int, " * 7 + "int, …)"


def test_a_micro_batch_cannot_be_changed() -> None:
    batch = MicroBatch(torch.ones(1), {"loss": 1.0}, 1, (0,), Cursor(0, 1), True)
    with pytest.raises(AttributeError):
        batch.samples = 2  # type: ignore[misc]
