"""What is known of each optimizer, parameter, scheduler, scaler and loader that was seen.

Bounded: counters, and rings of the latest records. Holds weak references only, so that nothing
lives longer under the audit than without it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from surefoot.sanitizer.frames import NOWHERE, Site

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from surefoot.sanitizer.graph import LossTerm

K = TypeVar("K")
S = TypeVar("S")
WINDOW_LIMIT = 1024
UPDATES_KEPT = 512


class ParameterState:
    """A tensor that some optimizer holds, and the ledger of its gradient buffer."""

    __slots__ = (
        "__weakref__",
        "backwards",
        "contributions",
        "dtype",
        "grad_id",
        "grad_version",
        "key",
        "name",
        "numel",
        "ref",
        "scale_pending",
        "shape",
        "touched",
        "unknown",
        "used",
        "witness",
    )

    def __init__(self, tensor: torch.Tensor, key: int) -> None:
        self.ref = weakref.ref(tensor)
        self.key = key
        self.shape = tuple(tensor.shape)
        self.numel = tensor.numel()
        self.dtype = tensor.dtype
        self.name = ""
        self.grad_id = 0
        """Identity of the gradient buffer last seen; 0 for None."""
        self.grad_version = -1
        self.contributions = 0
        """Backward passes summed in the buffer as it is now."""
        self.used = 0
        """Those of them that a step has already used."""
        self.touched = False
        """Whether something that is not a known call changed the buffer since the last step."""
        self.unknown = False
        """Whether such a change made the two counts unreliable."""
        self.backwards = 0
        """Backward passes that changed the buffer, in all."""
        self.scale_pending = False
        """Whether the buffer holds gradients of a scaled loss."""
        self.witness: tuple[float, ...] | None = None
        """First values of the buffer as last seen, of one parameter of each optimizer."""

    def __str__(self) -> str:
        return self.name or f"parameter of shape {self.shape}"


@dataclass(frozen=True, slots=True)
class BackwardRecord:
    """One backward pass of a window."""

    seq: int
    site: Site
    terms: tuple[LossTerm, ...]
    loader: int
    """Key of the loader that gave the latest batch; 0 for none."""
    epoch: int
    """How often that loader had been iterated."""
    batch: int
    """Number of batches fetched from any loader so far."""
    graph_uses: int
    num_changed: int
    """Parameters whose gradient it changed."""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One completed update."""

    number: int
    seq: int
    site: Site
    backwards: tuple[BackwardRecord, ...]
    wipes: int
    """How often gradients of this window were zeroed unused."""
    touched: bool
    """Whether the user's own code changed gradients between the first backward and the step."""
    rates: tuple[float, ...]


class OptimizerState:
    """One optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, key: int, site: Site, seq: int) -> None:
        self.ref = weakref.ref(optimizer)
        self.key = key
        self.kind = type(optimizer).__name__
        self.site = site
        self.created = seq
        self.parameters: list[ParameterState] = []
        self.steps = 0
        self.inner_steps = 0
        """Steps within that of another optimizer, such as SAM's, which counts the update."""
        self.last_step = 0
        """Sequence number of the latest step; 0 before the first."""
        self.last_step_site = NOWHERE
        self.last_backward = 0
        self.last_backward_site = NOWHERE
        self.window: list[BackwardRecord] = []
        self.wipes = 0
        """Zeroings of unused gradients in the window that is open."""
        self.wipe_site = NOWHERE
        self.cleared = False
        """Whether that was already counted for the gradients of the latest backward pass."""
        self.updates: deque[UpdateRecord] = deque(maxlen=UPDATES_KEPT)
        self.window_sizes: Counter[int] = Counter()
        self.skipped = 0
        """Steps that a gradient scaler skipped."""
        self.decays: tuple[float, ...] = ()
        """Weight decay of each group, as last looked at."""

    @property
    def has_stepped(self) -> bool:
        return self.steps + self.inner_steps > 0

    def groups(self) -> list[dict[str, Any]]:
        optimizer = self.ref()
        return [] if optimizer is None else optimizer.param_groups

    def rates(self) -> tuple[float, ...]:
        """Learning rate of each group; those of the latest update once the optimizer is gone."""
        if self.ref() is None and self.updates:
            return self.updates[-1].rates
        return tuple(float(group["lr"]) for group in self.groups() if "lr" in group)

    @property
    def has_unused(self) -> bool:
        """Whether a buffer holds a backward pass that no step has used."""
        return any(p.contributions > p.used or p.unknown for p in self.parameters)

    def __str__(self) -> str:
        return f"{self.kind} made at {self.site}"


class SchedulerState:
    """One learning-rate scheduler."""

    def __init__(self, scheduler: LRScheduler, key: int, site: Site, seq: int) -> None:
        self.ref = weakref.ref(scheduler)
        self.key = key
        self.kind = type(scheduler).__name__
        self.site = site
        self.created = seq
        self.optimizer: OptimizerState | None = None
        self.optimizer_steps_at_creation = 0
        self.steps = 0
        self.last_site = NOWHERE
        self.inner = False
        """Whether another scheduler steps it."""

    @property
    def updates(self) -> int:
        """Updates of its optimizer since it was made."""
        optimizer = self.optimizer
        return 0 if optimizer is None else optimizer.steps - self.optimizer_steps_at_creation

    def __str__(self) -> str:
        return f"{self.kind} made at {self.site}"


class ScalerState:
    """One gradient scaler."""

    def __init__(self, scaler: torch.amp.GradScaler, key: int) -> None:
        self.ref = weakref.ref(scaler)
        self.key = key
        self.steps = 0
        self.scale: float | None = None
        """The scale last applied, where reading it costs no synchronisation."""


class LoaderState:
    """One DataLoader."""

    def __init__(self, loader: Any, key: int, site: Site) -> None:
        self.ref = weakref.ref(loader)
        self.key = key
        self.site = site
        self.epochs = 0
        """How often it was iterated."""
        self.ends = 0
        self.batches = 0
        self.steps = 0
        """Updates that followed a batch of this loader."""
        self.num_batches: int | None = None
        self.sampler = ""

    def __str__(self) -> str:
        return f"DataLoader first used at {self.site}"


class Table(Generic[K, S]):
    """States by identity of the thing they describe."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], S]] = {}
        self._keys = itertools.count(1)
        self.states: list[S] = []

    def find(self, thing: K) -> S | None:
        entry = self._by_id.get(id(thing))
        # An identity can be given out again after its owner has gone.
        return entry[1] if entry is not None and entry[0]() is thing else None

    def next_key(self) -> int:
        return next(self._keys)

    def add(self, thing: K, state: S, keep: int = 100_000) -> S:
        self._by_id[id(thing)] = (weakref.ref(thing), state)
        if len(self.states) < keep:
            self.states.append(state)
        return state

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)


@dataclass
class DataPosition:
    """Where in the data the loop stands."""

    loader: LoaderState | None = None
    batches: int = 0
