"""What the rules about parameter coverage share: leaves of the graph, and whether they move."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from surefoot.sanitizer import events as ev
from surefoot.sanitizer import graph
from surefoot.sanitizer.frames import Site
from surefoot.sanitizer.listener import Listener

MOST_LEAVES = 20_000
LEAST_UPDATES = 3
VALUES = 4


@dataclass
class Leaf:
    """A leaf tensor that graphs reach."""

    ref: weakref.ref[torch.Tensor]
    name: str
    kind: str
    numel: int
    version: int
    pointer: int
    first_update: int
    site: Site
    first_look: int = field(default=0, init=False)
    """How many graphs had been looked at before."""
    last_update: int = field(init=False)
    seen: int = field(default=1, init=False)
    moved: bool = field(default=False, init=False)
    held: bool = field(default=False, init=False)
    """Whether an optimizer came to hold it."""
    in_vain: int = field(default=0, init=False)
    """Backward passes that reached it and no weight of any optimizer."""
    steps_in_vain: int = field(default=0, init=False)
    """Those of them that a step of an optimizer followed all the same."""
    marked: bool = field(default=False, init=False)
    """What the rule that watches wants to remember of it."""
    clipped: int = field(default=0, init=False)
    """How often its gradient was clipped."""
    root: int = field(default=0, init=False)
    """Key of the outermost module that it belongs to; 0 where unknown."""
    values: tuple[float, ...] = field(default=(), init=False)
    """A few of its values, where the host may read them."""

    def __post_init__(self) -> None:
        self.last_update = self.first_update


class UnheldLeaves(Listener):
    """The leaves that no optimizer holds, and whether anything changes them."""

    def setup(self) -> None:
        self.looks = 0
        self.known: dict[int, Leaf] = {}
        self.gone: list[Leaf] = []

    def on_backward_begin(self, event: ev.BackwardBegin) -> None:
        if not event.walk:
            return
        self.looks += 1
        for tensor in event.leaves:
            leaf = self.known.get(id(tensor))
            if leaf is None or leaf.ref() is not tensor:
                if leaf is not None:
                    self.gone.append(leaf)
                if self.trace.parameters.find(tensor) is None and len(self.known) < MOST_LEAVES:
                    self._add(tensor, event.site)
                continue
            leaf.seen += 1
            leaf.held = leaf.held or self.trace.parameters.find(tensor) is not None
            leaf.kind = leaf.kind or self.trace.names.owner_kind(tensor)
            leaf.name = self.trace.names.of(tensor) if leaf.kind else leaf.name
            leaf.last_update = self.trace.updates
            leaf.moved = leaf.moved or self._moved(leaf, tensor)

    def find(self, tensor: torch.Tensor) -> Leaf | None:
        """The leaf of a tensor."""
        leaf = self.known.get(id(tensor))
        return leaf if leaf is not None and leaf.ref() is tensor else None

    def share_of_looks(self, leaf: Leaf) -> float:
        """Share of the graphs, since the first that did, which reached a leaf."""
        return leaf.seen / max(1, self.looks - leaf.first_look)

    def _moved(self, leaf: Leaf, tensor: torch.Tensor) -> bool:
        # Changes through `.data` count no version.
        return (
            leaf.version != tensor._version
            or leaf.pointer != tensor.data_ptr()
            or leaf.values != some_values(tensor)
        )

    def _add(self, tensor: torch.Tensor, site: Site) -> None:
        leaf = self.known[id(tensor)] = Leaf(
            ref=weakref.ref(tensor),
            name=self.trace.names.of(tensor),
            kind=self.trace.names.owner_kind(tensor),
            numel=tensor.numel(),
            version=tensor._version,
            pointer=tensor.data_ptr(),
            first_update=self.trace.updates,
            site=site,
        )
        leaf.first_look = self.looks - 1
        leaf.values = some_values(tensor)

    def forgotten(self) -> list[Leaf]:
        """Leaves that graphs reached over several updates and that nothing ever changed."""
        found = []
        for leaf in (*self.gone, *self.known.values()):
            # The tensor may be gone by now; then what was seen last counts.
            tensor = leaf.ref()
            held = leaf.held
            held = held or (tensor is not None and self.trace.parameters.find(tensor) is not None)
            moved = leaf.moved or (tensor is not None and self._moved(leaf, tensor))
            if not held and not moved and leaf.last_update - leaf.first_update >= LEAST_UPDATES:
                found.append(leaf)
        return found


def some_values(tensor: torch.Tensor) -> tuple[float, ...]:
    """A few values of a tensor, where the host may read them."""
    if not graph.is_readable(tensor) or tensor.is_complex():
        return ()
    flat = tensor.detach().reshape(-1)
    sample: list[float] = flat[:: max(1, flat.numel() // VALUES)][:VALUES].tolist()
    return tuple(sample)


def weights_mark(weights: Iterable[torch.Tensor]) -> tuple[int, tuple[float, ...]]:
    """Changes when the weights do, in place or by an assignment to `.data`, without a version."""
    first: tuple[float, ...] | None = None
    versions = 0
    for weight in weights:
        versions += weight._version
        if first is None and weight.numel() > 1:
            first = some_values(weight)
    return versions, first or ()


def sample_of(tensor: torch.Tensor, most: int = 512) -> torch.Tensor:
    """A copy of at most that many of its values, spread evenly."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // most)][:most].clone()


def listed(names: list[str], most: int = 6) -> str:
    """The first few names, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
