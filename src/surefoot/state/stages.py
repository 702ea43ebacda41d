"""State of a run with pipeline stages: what a rank contributes and what it reads.

A checkpoint names each tensor once, without stages. A rank with other layers than rank 0
contributes its entries, and a rank reads only its own. No tensor is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from surefoot.parallel.sizes import ParameterSizes
from surefoot.state.tree import Snapshot, written_key

STAGES_KEY: Final = "stages"
"""Key of a rank's entries for its layers; merged into the state before it is written."""
BY_TENSOR: Final = (
    ("model",),
    ("optimizer", "shapes"),
    ("optimizer", "parameters"),
    ("optimizer", "masters"),
    ("average", "weights"),
)
"""Where the state has an entry per tensor of the model, or per trained tensor."""
BY_GROUP: Final = ("optimizer", "groups")


@dataclass(frozen=True)
class Layers:
    """The layers that this rank holds.

    Args:
        elsewhere: names of the model's tensors on other ranks.
        size_elsewhere: sizes of the parameters on other ranks.
        tells: whether this rank contributes for those with the same layers, and is not rank 0.
    """

    elsewhere: frozenset[str] = frozenset()
    size_elsewhere: ParameterSizes = field(default_factory=ParameterSizes)
    tells: bool = False


ALL_LAYERS: Final = Layers()


def telling(snapshot: Snapshot, layers: Layers) -> Snapshot:
    """This rank's snapshot with the entries for its layers."""
    if not layers.tells:
        return snapshot
    entries = {"/".join(path): _at(snapshot.values, path) for path in (*BY_TENSOR, BY_GROUP)}
    return Snapshot(snapshot.tensors, {**snapshot.values, STAGES_KEY: entries})


def joined(values: Mapping[str, Any], contributed: Mapping[str, Any]) -> dict[str, Any]:
    """The state of rank 0 merged with another rank's entries; common ones are rank 0's."""
    for place, entries in contributed.items():
        path = place.split("/")
        if entries:
            values = _with(values, path, {**entries, **_at(values, path)})
    return dict(values)


def own_part(snapshot: Snapshot, layers: Layers) -> Snapshot:
    """A snapshot of all layers without those of other ranks."""
    values = snapshot.values
    elsewhere = {written_key(name) for name in layers.elsewhere}
    for path in BY_TENSOR if elsewhere else ():
        entries = _at(values, path)
        kept = {name: item for name, item in entries.items() if name not in elsewhere}
        if len(kept) < len(entries):
            values = _with(values, path, kept)
    return Snapshot(snapshot.tensors, values)


def _at(values: Any, path: tuple[str, ...] | list[str]) -> Mapping[str, Any]:
    for key in path:
        values = values.get(key, {}) if isinstance(values, Mapping) else {}
    return values if isinstance(values, Mapping) else {}


def _with(values: Mapping[str, Any], path: Any, entries: Mapping[str, Any]) -> dict[str, Any]:
    key, *rest = path
    inner = _with(values.get(key, {}), rest, entries) if rest else dict(entries)
    return {**values, key: inner}
