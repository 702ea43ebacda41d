"""Observes process groups, DistributedDataParallel and collectives. Starts no communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.state import ParameterState
from surefoot.sanitizer.trace import Trace

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
)
COMPARED = 8
MOST_SENT = 100_000


def attach(patches: Patches) -> None:
    """Watches distributed for as long as the patches are in place."""
    if not dist.is_available():
        return
    trace = patches.trace

    def initialise(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        trace.safely(_ranked, trace)

    def construct(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        trace.safely(_wrapped, trace, self)

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        trace.safely(_called, trace, self)
        return original(self, *args, **kwargs)

    patches.around(dist, "init_process_group", initialise, rebind=True)
    patches.around(DistributedDataParallel, "__init__", construct)
    patches.around(DistributedDataParallel, "forward", forward)
    buffers = Buffers(trace)
    trace.listen(buffers)
    for name in COLLECTIVES:
        if hasattr(dist, name):
            patches.around(dist, name, _collective(trace, name, buffers), rebind=True)


class Buffers:
    """Tells gradients and weights among tensors, also where they are seen through `.data`."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.looked = -1
        self.gradients: dict[int, ParameterState] = {}
        self.sent: dict[int, tuple[int, ...]] = {}
        """Addresses that were broadcast before any optimizer was there, and the ranks."""
        self.weights: set[int] = set()

    def look(self) -> None:
        """Learns the addresses anew, once per backward pass."""
        if self.looked == self.trace.walks.backwards:
            return
        self.looked = self.trace.walks.backwards
        self.gradients, self.weights = {}, set()
        for state in self.trace.gradients.all_parameters():
            tensor = state.ref()
            if tensor is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                continue
            self.weights.add(tensor.data_ptr())
            if tensor.grad is not None and not tensor.grad.is_sparse:
                self.gradients[tensor.grad.data_ptr()] = state

    def note_sent(self, tensors: Iterable[torch.Tensor], group: Any) -> None:
        for tensor in tensors:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and len(self.sent) < MOST_SENT:
                self.sent[tensor.data_ptr()] = group_ranks(group)

    def on_optimizer_created(self, event: ev.OptimizerCreated) -> None:
        """Weights that were sent to all ranks before they were an optimizer's."""
        held = (state.ref() for state in event.optimizer.parameters)
        plain = [t for t in held if type(t) in (torch.Tensor, torch.nn.Parameter)]
        ranks = {self.sent.get(tensor.data_ptr(), ()) for tensor in plain if tensor is not None}
        if len(ranks) == 1 and ranks != {()}:
            self.trace.emit(
                ev.Collective(
                    seq=self.trace.tick(),
                    site=event.site,
                    name="broadcast",
                    on_gradient=False,
                    on_weight=True,
                    ranks=ranks.pop(),
                )
            )

    def kind(self, tensor: torch.Tensor) -> str:
        """`gradient`, `weight` or nothing, before the collective has changed the values."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_sparse:
            return ""
        self.look()
        address = tensor.data_ptr()
        if address in self.gradients:
            return "gradient"
        if address in self.weights:
            return "weight"
        return self._flat(tensor)

    def _flat(self, tensor: torch.Tensor) -> str:
        # All of an optimizer's in one tensor: as many values, and it begins like the first.
        if tensor.dim() != 1 or not tensor.is_floating_point():
            return ""
        for optimizer in self.trace.optimizers:
            held = [t for s in optimizer.parameters if (t := s.ref()) is not None]
            held = [t for t in held if t.grad is not None]
            if not held or sum(t.numel() for t in held) != tensor.numel():
                continue
            for name, first in (("gradient", held[0].grad), ("weight", held[0])):
                if first is not None and _begins_alike(tensor, first):
                    return name
        return ""


def _begins_alike(flat: torch.Tensor, first: torch.Tensor) -> bool:
    head = first.detach().reshape(-1)[:COMPARED]
    return torch.equal(flat.detach()[: len(head)].to(head.dtype), head)


def group_ranks(group: Any = None) -> tuple[int, ...]:
    """Ranks of a process group, the default one if there is none given; empty without any."""
    if not dist.is_initialized():
        return ()
    return tuple(dist.get_process_group_ranks(group))


def _ranked(trace: Trace) -> None:
    trace.rank = dist.get_rank()


def _wrapped(trace: Trace, wrapper: Any) -> None:
    _ranked(trace)
    trace.names.know(wrapper.module)
    ranks = group_ranks(wrapper.process_group)
    trace.emit(ev.ParallelWrapped(**trace.here(), wrapper=wrapper, ranks=ranks))


def _called(trace: Trace, wrapper: Any) -> None:
    if torch.is_grad_enabled():
        trace.emit(
            ev.ParallelForward(
                **trace.here(),
                wrapper=wrapper,
                synchronises=bool(wrapper.require_backward_grad_sync),
            )
        )


def _collective(trace: Trace, name: str, buffers: Buffers) -> Any:
    def collective(original: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = trace.safely(_kinds, buffers, args, kwargs) or set()
        # Gradients averaged by hand are changed here, not "by the user".
        trace.causes.append("collective")
        try:
            result = original(*args, **kwargs)
            if "gradient" in kinds:
                trace.safely(_changed, trace, buffers, args, kwargs)
        finally:
            trace.causes.pop()
        trace.safely(_ran, trace, name, kinds, _group(args, kwargs))
        if name == "broadcast" and not trace.updates:
            trace.safely(
                buffers.note_sent, _tensors((*args, *kwargs.values())), _group(args, kwargs)
            )
        return result

    return collective


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def _kinds(buffers: Buffers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    return {buffers.kind(tensor) for tensor in _tensors((*args, *kwargs.values()))}


def _changed(trace: Trace, buffers: Buffers, args: Any, kwargs: Any) -> None:
    addresses = [t.data_ptr() for t in _tensors((*args, *kwargs.values())) if not t.is_sparse]
    known = (buffers.gradients.get(address) for address in addresses)
    trace.gradients.changed_by_collective([state for state in known if state is not None])


def _group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = [v for v in (*args, *kwargs.values()) if isinstance(v, dist.ProcessGroup)]
    return found[0] if found else None


def _ran(trace: Trace, name: str, kinds: set[str], group: Any) -> None:
    if trace.rank is None and dist.is_initialized():
        _ranked(trace)
    trace.emit(
        ev.Collective(
            **trace.here(),
            name=name,
            on_gradient="gradient" in kinds,
            on_weight="weight" in kinds,
            ranks=group_ranks(group),
        )
    )
