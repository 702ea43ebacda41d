"""The trace: takes what the probe sees, keeps the structure of the loop, hands events to rules.

It knows optimizers, windows, updates, loaders and names. It judges nothing, and an error in here
or in a rule never reaches the script.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE, Site, user_site
from surefoot.sanitizer.request import StopAudit
from surefoot.sanitizer.state import (
    WINDOW_LIMIT,
    BackwardRecord,
    DataPosition,
    LoaderState,
    OptimizerState,
    ParameterState,
    ScalerState,
    SchedulerState,
    Table,
    UpdateRecord,
)
from surefoot.sanitizer.summary import failure

FIRST_WALKS = 8
WALK_EVERY = 50
WALK_UNTIL = 1000
EXTRA_WALKS = 5
NAMED_UPDATES = 2
MOST_WALKS = 200
ROOTS_KEPT = 64
WITNESSED = 6
SCALED = 0.01
"""Values that were scaled together agree to half precision."""
INTERNAL_ERRORS_KEPT = 20
P = TypeVar("P")


class Trace:
    """Everything that is known of one process."""

    def __init__(self, *, deep: bool = False, max_updates: int | None = None) -> None:
        self.deep = deep
        self.max_updates = max_updates
        self.active = True
        self.outcome = ""
        """How the script ended; empty while it runs."""
        self.busy = False
        self.rank: int | None = None
        """Rank in the default process group; None until there is one."""
        self.optimizers: Table[torch.optim.Optimizer, OptimizerState] = Table()
        self.parameters: Table[torch.Tensor, ParameterState] = Table()
        self.schedulers: Table[Any, SchedulerState] = Table()
        self.scalers: Table[Any, ScalerState] = Table()
        self.loaders: Table[Any, LoaderState] = Table()
        self.modules: Table[nn.Module, int] = Table()
        self._held: list[list[ParameterState]] = []
        self._all: list[ParameterState] = []
        self._trained: dict[int, tuple[int, bool]] = {}
        self.before_end: list[Callable[[], None]] = []
        """What parts of the probe still want to report when the script is over."""
        self.after_update: list[Callable[[], None]] = []
        self.data = DataPosition()
        self.causes: list[str] = []
        """Known calls that are running, outermost first: `backward`, `step`, `clip`, ..."""
        self.updates = 0
        self.backwards = 0
        self.walks = 0
        self.extra_walks = 0
        self._last_fed: tuple[int, ...] = ()
        self.roots: list[weakref.ref[nn.Module]] = []
        self._root_ids: set[int] = set()
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str, str]] = {}
        self.seq = 0
        self.internal_errors: list[str] = []
        self._listeners: dict[type[ev.TraceEvent], list[Any]] = {}
        self._shared: dict[object, Any] = {}
        self.failed: list[object] = []
        """Listeners that raised an error: they get no more events and are not asked."""
        self._counter = itertools.count(1)

    # -- handing events round ------------------------------------------------------------------

    def listen(self, listener: object) -> None:
        """Calls the `on_...` methods of `listener` for the events they are named after."""
        for name, kind in ev.HANDLERS.items():
            handler = getattr(listener, name, None)
            if handler is not None:
                self._listeners.setdefault(kind, []).append(handler)

    def shared(self, kind: Callable[[Trace], P]) -> P:
        """The one listener of that kind, made and attached when it is first asked for."""
        found = self._shared.get(kind)
        if found is None:
            found = self._shared[kind] = kind(self)
            self.listen(found)
        return found

    def wants(self, event_kind: type[ev.TraceEvent]) -> bool:
        """Whether anybody listens to this kind."""
        return event_kind in self._listeners

    def emit(self, event: ev.TraceEvent) -> None:
        for handler in tuple(self._listeners.get(type(event), ())):
            try:
                handler(event)
            except Exception:
                self.note_error(handler.__qualname__)
                self.drop(handler.__self__)

    def drop(self, listener: object) -> None:
        """Hands no more events to a listener that has failed."""
        self.failed.append(listener)
        for kind, handlers in self._listeners.items():
            self._listeners[kind] = [h for h in handlers if h.__self__ is not listener]

    def tick(self) -> int:
        self.seq = next(self._counter)
        return self.seq

    def here(self) -> dict[str, Any]:
        """Sequence number and place for an event about what the user's code is doing now."""
        return {"seq": self.tick(), "site": user_site(2)}

    def safely(self, observe: Callable[..., Any], *arguments: Any) -> Any:
        """Runs one of our own observations: what it raises is noted, never passed on."""
        if not self.active or self.busy:
            return None
        self.busy = True
        try:
            return observe(*arguments)
        except StopAudit:
            raise
        except Exception:
            self.note_error(getattr(observe, "__qualname__", str(observe)))
            return None
        finally:
            self.busy = False

    def note_error(self, where: str) -> None:
        if len(self.internal_errors) < INTERNAL_ERRORS_KEPT:
            self.internal_errors.append(failure(where))

    # -- parameters ------------------------------------------------------------------------------

    def parameter(self, tensor: torch.Tensor) -> ParameterState:
        state = self.parameters.find(tensor)
        if state is None:
            key = self.parameters.next_key()
            state = self.parameters.add(tensor, ParameterState(tensor, key))
        return state

    def refresh(self, optimizer: OptimizerState) -> None:
        """Takes up parameters that were added to an optimizer or replaced in it."""
        tensors = [tensor for group in optimizer.groups() for tensor in group["params"]]
        known = optimizer.parameters
        if len(known) != len(tensors) or any(
            state.ref() is not tensor for state, tensor in zip(known, tensors, strict=True)
        ):
            optimizer.parameters = [self.parameter(tensor) for tensor in tensors]
            several = [state for state in optimizer.parameters if state.numel > 1]
            if several:
                smallest = min(several, key=lambda state: state.numel)
                smallest.witness = smallest.witness or ()

    def observe_gradients(self, states: Iterable[ParameterState]) -> list[ParameterState]:
        """Compares gradient buffers with what was last seen; returns those that changed.

        A change is put down to the known call that is running, or to the user's own code.
        """
        cause = self.causes[-1] if self.causes else "user"
        changed, by_hand = [], []
        for state in states:
            tensor = state.ref()
            if tensor is None:
                continue
            gradient = tensor.grad
            if gradient is None:
                if state.grad_id:
                    state.grad_id, state.grad_version = 0, -1
                    state.contributions = state.used = 0
                    state.unknown = state.scale_pending = False
                    changed.append(state)
                continue
            identity, version = id(gradient), gradient._version
            if identity == state.grad_id and version == state.grad_version:
                continue
            fresh = state.grad_id == 0
            state.grad_id, state.grad_version = identity, version
            changed.append(state)
            if cause == "user":
                by_hand.append((state, gradient))
            else:
                self._account(state, cause, fresh)
                state.witness = None if state.witness is None else _first_values(gradient)
        if by_hand:
            self._account_by_hand(by_hand)
        return changed

    def _account_by_hand(self, changed: Sequence[tuple[ParameterState, torch.Tensor]]) -> None:
        """The user's own code changed gradients: cleared them, scaled them, or anything else."""
        scaled = False
        for state, gradient in changed:
            if state.witness is not None:
                before, state.witness = state.witness, _first_values(gradient)
                # Scaled after use is a momentum of the user's own making.
                is_fresh = state.contributions > state.used
                scaled = scaled or (is_fresh and _is_scaled(before, state.witness))
        for state, gradient in changed:
            state.touched = True
            if gradient.is_sparse or gradient.device.type != "cpu":
                state.unknown = True
            elif not bool(gradient.any()):
                state.contributions = state.used = 0
                state.unknown = False
            elif scaled:
                state.scale_pending = False
            else:
                state.unknown = True

    def changed_by_collective(self, states: Iterable[ParameterState]) -> None:
        """Gradients were summed over ranks, which no version of a tensor tells."""
        for state in states:
            self.observe_gradients([state])
            tensor = state.ref()
            if state.witness is not None and tensor is not None and tensor.grad is not None:
                state.witness = _first_values(tensor.grad)

    def _account(self, state: ParameterState, cause: str, fresh: bool) -> None:
        if cause == "backward":
            state.contributions = 1 if fresh else state.contributions + 1
            state.backwards += 1
            state.last_backward = self.seq
        elif cause == "zero":
            state.contributions = state.used = 0
            state.unknown = state.scale_pending = False

    def module_key(self, module: nn.Module) -> int:
        """A number that stands for a module, for rules that must not keep it."""
        key = self.modules.find(module)
        return self.modules.add(module, self.modules.next_key(), keep=0) if key is None else key

    def is_trained(self, module: nn.Module) -> bool:
        """Whether an optimizer that has stepped holds parameters of `module`."""
        key = self.module_key(module)
        looked, trained = self._trained.get(key, (-1, False))
        # Once trained, always; else looked at again when the number of updates has doubled.
        if trained or (looked >= 0 and looked <= self.updates < 2 * looked):
            return trained
        if looked == self.updates:
            return trained
        keys = set()
        for tensor in module.parameters():
            state = self.parameters.find(tensor)
            if state is not None:
                keys.add(state.key)
        trained = bool(keys) and any(
            optimizer.steps and any(state.key in keys for state in optimizer.parameters)
            for optimizer in self.optimizers
        )
        self._trained[key] = self.updates, trained
        return trained

    def all_parameters(self) -> Sequence[ParameterState]:
        """Each parameter of the optimizers that are alive, once."""
        held = [o.parameters for o in self.optimizers if o.ref() is not None]
        # Asked for at every backward pass: made anew only when an optimizer's list is another.
        if len(held) != len(self._held) or any(map(operator.is_not, held, self._held)):
            self._held = held
            self._all = list({state.key: state for states in held for state in states}.values())
        return self._all

    # -- names -------------------------------------------------------------------------------------

    def know_root(self, module: nn.Module) -> None:
        """Remembers an outermost module, to name parameters by."""
        if id(module) in self._root_ids and any(root() is module for root in self.roots):
            return
        self._root_ids.add(id(module))
        if len(self.roots) < ROOTS_KEPT:
            self.roots.append(weakref.ref(module))
            self._learn_names(module)

    def learn_names(self) -> None:
        """Names what joined the outermost modules since they were first seen."""
        for root in self.roots:
            module = root()
            if module is not None:
                self._learn_names(module)

    def _learn_names(self, module: nn.Module) -> None:
        for prefix, child in module.named_modules():
            for name, tensor in child._parameters.items():
                if tensor is None:
                    continue
                full = f"{prefix}.{name}" if prefix else name
                entry = self._names.get(id(tensor))
                if entry is None or entry[0]() is not tensor:
                    self._names[id(tensor)] = (weakref.ref(tensor), full, type(child).__name__)

    def name(self, tensor: torch.Tensor | ParameterState | None) -> str:
        """The name of a parameter in its model, or its shape."""
        if isinstance(tensor, ParameterState) and tensor.name:
            return tensor.name
        found = self._find_name(tensor)
        if found is None:
            return "a parameter" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
        return found[0]

    def owner_kind(self, tensor: torch.Tensor | ParameterState | None) -> str:
        """The class name of the module that holds a parameter; empty where unknown."""
        found = self._find_name(tensor)
        return "" if found is None else found[1]

    def _find_name(self, tensor: torch.Tensor | ParameterState | None) -> tuple[str, str] | None:
        if isinstance(tensor, ParameterState):
            tensor = tensor.ref()
        if tensor is None:
            return None
        entry = self._names.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        return entry[1], entry[2]

    def names(self, states: Iterable[Any], most: int = 5) -> list[str]:
        """The first few names."""
        return [self.name(state) for state in itertools.islice(states, most)]

    # -- structure ---------------------------------------------------------------------------------

    def walk_now(self) -> bool:
        """Whether the backward that begins now is one whose whole graph is worth a walk."""
        n = self.backwards
        regular = n < FIRST_WALKS or (n % WALK_EVERY == 0 and n <= WALK_UNTIL) or n & (n - 1) == 0
        if self.extra_walks:
            self.extra_walks -= 1
        if regular or self.extra_walks:
            self.walks += 1
            return True
        return False

    def look_closer(self) -> None:
        """Something changed: worth a look at the next few graphs."""
        if self.walks < MOST_WALKS:
            self.extra_walks = EXTRA_WALKS

    def record_backward(
        self, site: Site, changed: Sequence[ParameterState], terms: Any, graph_uses: int
    ) -> list[OptimizerState]:
        """Adds one backward pass to the window of every optimizer it feeds."""
        keys = {state.key for state in changed}
        loader = self.data.loader
        record = BackwardRecord(
            self.seq,
            site,
            terms,
            0 if loader is None else loader.key,
            0 if loader is None else loader.epochs,
            self.data.batches,
            graph_uses,
            len(changed),
        )
        fed = []
        for optimizer in self.optimizers:
            if optimizer.ref() is None:
                continue
            if any(state.key in keys for state in optimizer.parameters):
                optimizer.last_backward, optimizer.last_backward_site = self.seq, site
                optimizer.cleared = False
                if len(optimizer.window) < WINDOW_LIMIT:
                    optimizer.window.append(record)
                fed.append(optimizer)
        keys_fed = (len(changed), *(optimizer.key for optimizer in fed))
        if keys_fed != self._last_fed:
            # The loop does something new.
            self.look_closer()
        self._last_fed = keys_fed
        if fed and loader is not None:
            loader.backwards += 1
        return fed

    def settle_windows(self) -> None:
        """Before a backward pass: what became of windows whose gradients were cleared by hand."""
        for optimizer in self.optimizers:
            if optimizer.window and not optimizer.cleared and not optimizer.has_unused:
                self.settle(optimizer, NOWHERE)

    def settle(self, optimizer: OptimizerState, site: Site) -> None:
        """The gradients of an open window are gone: used by another optimizer, or lost."""
        keys = {state.key for state in optimizer.parameters}
        used = any(
            other.last_step > optimizer.last_backward
            and any(state.key in keys for state in other.parameters)
            for other in self.optimizers
        )
        if used:
            self.close_window(optimizer)
        else:
            optimizer.wipes += 1
            optimizer.wipe_site = site
            optimizer.cleared = True

    def record_update(self, optimizer: OptimizerState, site: Site) -> UpdateRecord:
        """Closes the window of an optimizer."""
        optimizer.steps += 1
        self.updates += 1
        if optimizer.steps == 1:
            # What was not trained so far may be from now on.
            self._trained = {key: seen for key, seen in self._trained.items() if seen[1]}
        if optimizer.steps <= NAMED_UPDATES:
            # Names and rates must outlive the model: most scripts build it inside a function.
            for state in optimizer.parameters:
                state.name = state.name or (self._find_name(state) or ("", ""))[0]
        optimizer.last_step, optimizer.last_step_site = self.seq, site
        record = UpdateRecord(
            optimizer.steps,
            self.seq,
            site,
            tuple(optimizer.window),
            optimizer.wipes,
            any(state.touched for state in optimizer.parameters),
            optimizer.rates(),
        )
        optimizer.updates.append(record)
        if optimizer.steps & (optimizer.steps - 1) == 0:
            optimizer.decays = tuple(g.get("weight_decay", 0) for g in optimizer.groups())
        optimizer.window_sizes[len(optimizer.window)] += 1
        self.close_window(optimizer)
        for state in optimizer.parameters:
            state.used = state.contributions
            state.touched = False
        if self.data.loader is not None:
            self.data.loader.steps += 1
        return record

    def close_window(self, optimizer: OptimizerState) -> None:
        optimizer.window = []
        optimizer.wipes = 0
        optimizer.wipe_site = NOWHERE
        optimizer.cleared = False
        optimizer.unscaled = False

    def finish_update(self) -> None:
        """The last thing of an update, when nothing of it is observed any more."""
        for look in tuple(self.after_update):
            self.safely(look)
        if self.max_updates is not None and self.updates >= self.max_updates:
            raise StopAudit

    @property
    def completed(self) -> bool:
        """Whether the script came to its own end."""
        return self.outcome == "completed"

    @property
    def training_began(self) -> bool:
        return self.updates > 0


def _first_values(gradient: torch.Tensor) -> tuple[float, ...]:
    if gradient.is_sparse or gradient.device.type != "cpu" or gradient.is_complex():
        return ()
    values: list[float] = gradient.detach().reshape(-1)[:WITNESSED].tolist()
    return tuple(values)


def _is_scaled(before: tuple[float, ...], after: tuple[float, ...]) -> bool:
    """Whether all values were multiplied by one positive number."""
    ratios = [b / a for a, b in zip(before, after, strict=False) if a]
    zeros = [b for a, b in zip(before, after, strict=False) if not a]
    if len(ratios) < 2 or any(zeros) or ratios[0] <= 0:
        return False
    return all(abs(ratio - ratios[0]) <= SCALED * ratios[0] for ratio in ratios)
