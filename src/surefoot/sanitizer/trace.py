"""The trace: takes what the probe sees, keeps the structure of the loop, hands events to rules.

It knows optimizers, windows, updates, loaders and names. It judges nothing, and an error in here
or in a rule never reaches the script.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import NOWHERE, Site, user_site
from surefoot.sanitizer.gradients import GradientLedger
from surefoot.sanitizer.names import ModelNames, parameters_of
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
from surefoot.sanitizer.walks import GraphWalks

NAMED_UPDATES = 2
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
        self.schedulers: Table[Any, SchedulerState] = Table()
        self.scalers: Table[Any, ScalerState] = Table()
        self.loaders: Table[Any, LoaderState] = Table()
        self.modules: Table[nn.Module, int] = Table()
        self.data = DataPosition()
        self.updates = 0
        self.causes: list[str] = []
        """Known calls that are running, outermost first: `backward`, `step`, `clip`, ..."""
        self.gradients = GradientLedger(self.optimizers, self.causes)
        self.parameters = self.gradients.parameters
        self.names = ModelNames()
        self.walks = GraphWalks()
        self.before_end: list[Callable[[], None]] = []
        """What parts of the probe still want to report when the script is over."""
        self.after_update: list[Callable[[], None]] = []
        self._trained: dict[int, tuple[int, bool]] = {}
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
                self.drop(getattr(handler, "__self__", handler))

    def drop(self, listener: object) -> None:
        """Hands no more events to a listener that has failed."""
        self.failed.append(listener)
        for kind, handlers in self._listeners.items():
            self._listeners[kind] = [
                h for h in handlers if getattr(h, "__self__", h) is not listener
            ]

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
        for tensor in parameters_of(module):
            state = self.parameters.find(tensor)
            if state is not None:
                keys.add(state.key)
        trained = bool(keys) and any(
            optimizer.steps and any(state.key in keys for state in optimizer.parameters)
            for optimizer in self.optimizers
        )
        self._trained[key] = self.updates, trained
        return trained

    # -- structure ---------------------------------------------------------------------------------

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
        self.walks.fed((len(changed), *(optimizer.key for optimizer in fed)))
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
                state.name = state.name or (self.names.find(state) or ("", ""))[0]
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
