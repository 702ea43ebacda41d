"""What the probe reports: typed, frozen events with a sequence number and the user's place.

An event lives while it is handed round. It may hold live tensors and modules; whoever wants to
keep something takes numbers, names and sites from it, never the tensors.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.sanitizer.frames import Site

if TYPE_CHECKING:
    import torch
    from torch import nn

    from surefoot.sanitizer.state import (
        LoaderState,
        OptimizerState,
        ParameterState,
        ScalerState,
        SchedulerState,
        UpdateRecord,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent(ABC):
    """What all events have."""

    seq: int
    site: Site


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCreated(TraceEvent):
    """An optimizer was constructed."""

    optimizer: OptimizerState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegin(TraceEvent):
    """An optimizer is about to step; gradients are as the step will see them."""

    optimizer: OptimizerState
    closure: bool
    inside_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd(TraceEvent):
    """An optimizer has stepped."""

    optimizer: OptimizerState
    update: UpdateRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGrad(TraceEvent):
    """`zero_grad` of an optimizer or a module has run."""

    parameters: Sequence[ParameterState]
    inside_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBegin(TraceEvent):
    """`backward` is about to run; the graph is whole."""

    roots: Sequence[torch.Tensor]
    walk: bool
    """Whether this backward is one of the sampled ones for which a walk of the graph is paid."""
    leaves: Sequence[torch.Tensor]
    """The leaves of the graph that ask for a gradient, where `walk` is True; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardEnd(TraceEvent):
    """`backward` has run."""

    changed: Sequence[ParameterState]
    """Parameters whose gradient this backward changed."""
    optimizers: Sequence[OptimizerState]
    inside_step: bool
    graph_uses: int
    """How often this root's graph node was backpropagated, this time included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(TraceEvent):
    """Gradients were clipped."""

    kind: str
    """`norm` or `value`."""
    limit: float
    parameters: Sequence[ParameterState]
    strangers: Sequence[torch.Tensor]
    """Tensors that belong to no optimizer seen."""
    norm: float | None
    """The norm before clipping, where reading it costs no synchronisation."""
    inside_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerStepped(TraceEvent):
    """`scaler.step(optimizer)` has run; `stepped` tells whether the optimizer did."""

    scaler: ScalerState
    optimizer: OptimizerState | None
    stepped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCreated(TraceEvent):
    """A learning-rate scheduler was constructed."""

    scheduler: SchedulerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStep(TraceEvent):
    """A learning-rate scheduler was stepped by the user (not by its own constructor)."""

    scheduler: SchedulerState
    before: tuple[float, ...]
    after: tuple[float, ...]
    by_user: bool
    """Whether the user's own line called it, not a library that steps once per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBegin(TraceEvent):
    """An outermost module with parameters is called."""

    module: nn.Module
    training: bool
    grad_enabled: bool
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What it is given, by position and by name."""
        return (*self.arguments, *self.keywords.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardEnd(TraceEvent):
    """An outermost module with parameters has answered."""

    module: nn.Module
    training: bool
    grad_enabled: bool
    autocast: torch.dtype | None
    """The type that autocast computed in, around the call or inside it."""
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any
    active_dropout: int
    """Dropout layers with p > 0 that ran in train mode during this call."""
    active_batch_norm: int
    """BatchNorm layers that updated or used batch statistics during this call."""
    idle_sensitive: int
    """Dropout and BatchNorm layers that ran in eval mode during this call."""
    idle_dropout: int
    """Those of them, and calls of `F.dropout`, that would have dropped in train mode."""
    input_grad: bool
    """Whether an input asks for a gradient of its own (attribution, adversarial inputs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmoduleFirstCalled(TraceEvent):
    """A module was called for the first time, inside an outermost module."""

    module: nn.Module
    root: nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShared(TraceEvent):
    """A parameter that one module has was given to a second one."""

    tensor: torch.Tensor
    holders: tuple[tuple[nn.Module, str], tuple[nn.Module, str]]
    """Each module, and its name for the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormCalled(TraceEvent):
    """A BatchNorm layer in train mode is about to run."""

    module: nn.Module
    root: nn.Module
    batch: int
    values_per_channel: int
    grad_enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormRepeated(TraceEvent):
    """At the end: further training calls of a BatchNorm layer, each with more than one sample.

    They are only counted while the script runs; most layers are called so all the time.
    """

    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutCalled(TraceEvent):
    """`F.dropout` (or a sibling) drew a mask."""

    owner: nn.Module | None
    """The innermost module whose forward is running; the Dropout layer itself if it is one."""
    root: nn.Module | None
    root_training: bool
    registered: bool
    """Whether `owner` is a module inside `root`."""
    owner_is_dropout: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChanged(TraceEvent):
    """`train()` or `eval()` was called."""

    module: nn.Module
    training: bool
    by_user: bool
    """Whether the user's own line called it, not a library that loads or evaluates a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCalled(TraceEvent):
    """A loss function of torch has run."""

    name: str
    input: torch.Tensor
    target: torch.Tensor
    options: Mapping[str, Any]
    output: torch.Tensor
    grad_enabled: bool
    call: int
    """How many calls of this function from this place there were, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCalled(TraceEvent):
    """`F.embedding` has run."""

    ids: torch.Tensor
    weight: torch.Tensor
    padding_idx: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStarted(TraceEvent):
    """A DataLoader is iterated anew."""

    loader: LoaderState
    owner: Any
    """The DataLoader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFetched(TraceEvent):
    """A DataLoader gave a batch."""

    loader: LoaderState
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded(TraceEvent):
    """A global random stream was seeded."""

    library: str
    seed: object


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPutBack(TraceEvent):
    """The state of torch's global random stream was set, as `fork_rng` does at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(TraceEvent):
    """`torch.save` has run."""

    contents: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(TraceEvent):
    """`torch.load` has run."""

    contents: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTaken(TraceEvent):
    """`state_dict()` was called by the user on an object of this kind."""

    kind: str
    owner: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRestored(TraceEvent):
    """`load_state_dict()` was called by the user on an object of this kind."""

    kind: str
    """`module`, `optimizer`, `scheduler`, `scaler`."""
    owner: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsUpdated(TraceEvent):
    """`update_bn` has run."""

    module: nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelWrapped(TraceEvent):
    """A module was wrapped in DistributedDataParallel."""

    wrapper: nn.Module
    ranks: tuple[int, ...]
    """Ranks of the group that shares its gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelForward(TraceEvent):
    """A module wrapped in DistributedDataParallel is called with gradients enabled."""

    wrapper: nn.Module
    synchronises: bool
    """Whether the backward pass of this call will reduce gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(TraceEvent):
    """A collective of torch.distributed ran."""

    name: str
    on_gradient: bool
    """Whether on a gradient, or on all gradients of an optimizer in one flat tensor."""
    on_weight: bool
    """The same for weights."""
    ranks: tuple[int, ...]
    """Ranks of its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport(TraceEvent):
    """What a data worker process told about its random streams."""

    worker: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised(TraceEvent):
    """The host waited for a device, asked by the user's own line."""

    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(TraceEvent):
    """The script is over."""

    outcome: str
    """`completed`, `crashed`, `stopped` (by `--steps`) or `interrupted`."""


def handler_name(kind: type[TraceEvent]) -> str:
    """The method that a rule defines to receive events of this kind.

    >>> handler_name(BackwardEnd)
    'on_backward_end'
    """
    letters = ["_" + c.lower() if c.isupper() else c for c in kind.__name__]
    return "on" + "".join(letters)


HANDLERS: Mapping[str, type[TraceEvent]] = {
    handler_name(kind): kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, TraceEvent) and kind is not TraceEvent
}
"""Each kind of event, by the method that receives it."""
