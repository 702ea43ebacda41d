"""The registry: ours and what packages bring are found alike; a name means one part."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from surefoot.core import doors
from surefoot.core.doors import (
    OURS,
    Door,
    brought,
    find_part,
    label_of,
    load_part,
    origin_of,
    parts,
)
from surefoot.core.errors import RequestError
from surefoot.core.targets import bind, call, name_of


def bring(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    def found(group: str) -> Sequence[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in entries]

    monkeypatch.setattr(doors, "entry_points", found)


@pytest.mark.parametrize(
    ("door", "name"), [(door, name) for door, names in OURS.items() for name in names]
)
def test_every_part_of_ours_can_be_loaded(door: Door, name: str) -> None:
    assert callable(load_part(door, name))
    assert origin_of(parts(door)[name]) == "surefoot"


def test_theirs_are_found_as_ours_are(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, ("ordered", "collections:OrderedDict"))
    assert list(parts(Door.OBSERVERS)) == [*sorted(OURS[Door.OBSERVERS]), "ordered"]
    chosen = SimpleNamespace(kind="ordered", target="none")
    assert find_part(Door.OBSERVERS, chosen, "observers.0").__name__ == "OrderedDict"
    custom = SimpleNamespace(kind="custom", target="collections:Counter")
    assert find_part(Door.OBSERVERS, custom, "observers.0").__name__ == "Counter"
    assert label_of(Door.OBSERVERS, custom) == "collections:Counter"


def test_a_name_means_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, ("lion", "a:Lion"), ("lion", "b:Lion"))
    with pytest.raises(RequestError, match="two packages bring 'lion': a:Lion and b:Lion"):
        brought(Door.OPTIMIZERS)
    bring(monkeypatch, ("csv", "a:Csv"))
    with pytest.raises(RequestError, match="two packages bring 'csv'"):
        brought(Door.SINKS)
    bring(monkeypatch, ("lion", "a:Lion"), ("lion", "a:Lion"))  # One installation, listed twice.
    assert list(brought(Door.OPTIMIZERS)) == ["lion"]


def test_what_is_not_there_is_named_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(monkeypatch, ("broken", "no_such_package:X"))
    with pytest.raises(RequestError, match="did you mean 'heartbeat'"):
        load_part(Door.OBSERVERS, "hartbeat")
    with pytest.raises(RequestError, match="'broken' cannot be imported: ModuleNotFoundError"):
        load_part(Door.OBSERVERS, "broken")


def power(base: float, exponent: float) -> float:
    return float(base**exponent)


class Power:
    """The same as a class."""

    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def __call__(self, base: float) -> float:
        return power(base, self.exponent)


@pytest.mark.parametrize("part", [power, Power])
def test_a_function_and_a_class_are_bound_to_the_same(part: object) -> None:
    assert bind(part, 1, {"exponent": 2}, "power", "clip")(3.0) == 9.0
    with pytest.raises(RequestError, match="exponnent"):
        bind(part, 1, {"exponnent": 2}, "power", "clip")


def test_what_cannot_be_called_is_named() -> None:
    with pytest.raises(RequestError, match="m:x is a int"):
        call(3, (), {}, "m:x", "clip")
    assert name_of(functools.partial(power, exponent=2)).endswith(":power")
