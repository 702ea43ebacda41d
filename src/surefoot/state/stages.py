"""The state of a run whose layers lie on several ranks: what a rank adds to it, and takes of it.

A checkpoint names each tensor once and says nothing of stages. So a rank with other layers than
rank 0 tells what it has of each, and a rank reads no more than is its own. No tensor is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from surefoot.parallel.sizes import ParameterSizes
from surefoot.state.tree import Snapshot, written_key

STAGES_KEY: Final = "stages"
"""Below it stands what a rank tells of its layers; joined to the rest before it is written."""
BY_TENSOR: Final = (
    ("model",),
    ("optimizer", "shapes"),
    ("optimizer", "parameters"),
    ("optimizer", "masters"),
    ("average", "weights"),
)
"""Where the state has an entry for each tensor of the model, or for each that is trained."""
BY_GROUP: Final = ("optimizer", "groups")


@dataclass(frozen=True)
class Layers:
    """Which layers this rank has.

    Args:
        elsewhere: names of the model's tensors that lie on other ranks.
        size_elsewhere: of the parameters that do.
        tells: whether this rank speaks for those with the same layers, and is not rank 0.
    """

    elsewhere: frozenset[str] = frozenset()
    size_elsewhere: ParameterSizes = field(default_factory=ParameterSizes)
    tells: bool = False


ALL_LAYERS: Final = Layers()


def telling(snapshot: Snapshot, layers: Layers) -> Snapshot:
    """A snapshot of this rank with what it tells of its layers."""
    if not layers.tells:
        return snapshot
    told = {"/".join(path): _at(snapshot.values, path) for path in (*BY_TENSOR, BY_GROUP)}
    return Snapshot(snapshot.tensors, {**snapshot.values, STAGES_KEY: told})


def joined(values: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The state of rank 0 with what another rank has told; what both have is that of rank 0."""
    for place, entries in told.items():
        path = place.split("/")
        if entries:
            values = _with(values, path, {**entries, **_at(values, path)})
    return dict(values)


def own_part(snapshot: Snapshot, layers: Layers) -> Snapshot:
    """A snapshot of all layers, less those of other ranks."""
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
