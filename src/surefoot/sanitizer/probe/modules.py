"""Observes calls of modules and their modes. Leaves outputs, modes and random streams alone."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import swa_utils

from surefoot.sanitizer import events as ev
from surefoot.sanitizer.frames import Site, called_by_user, user_site
from surefoot.sanitizer.names import parameters_of
from surefoot.sanitizer.probe.patches import Patches
from surefoot.sanitizer.trace import Trace

MODULES_KEPT = 100_000
SENSITIVE = (_BatchNorm, _DropoutNd, nn.RNNBase, nn.MultiheadAttention)
DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


class RoutineCalls:
    """Calls of one BatchNorm layer of which nothing but their number is to be told."""

    __slots__ = ("count", "layer", "site")

    def __init__(self, layer: _BatchNorm, site: Site) -> None:
        self.layer = weakref.ref(layer)
        self.site = site
        self.count = 0


class ModuleCalls:
    """The modules whose forward is running, and what the outermost one has met."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.stack: list[nn.Module] = []
        self.seen: dict[int, weakref.ref[nn.Module]] = {}
        self.trainable: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        self.active_dropout = 0
        self.active_batch_norm = 0
        self.idle = self.idle_dropout = 0
        self.autocast: torch.dtype | None = None
        """What autocast was switched on inside the outermost call, if any was."""
        self.mode_depth = 0
        self.routine: dict[int, RoutineCalls] = {}
        """BatchNorm layers whose latest call was one like most, by identity."""

    @property
    def root(self) -> nn.Module | None:
        return self.stack[0] if self.stack else None

    def is_routine(self, layer: _BatchNorm, args: tuple[Any, ...]) -> bool:
        """Counts a training call like those before it; False where it has to be looked at."""
        entry = self.routine.get(id(layer))
        if entry is None or entry.layer() is not layer or not layer.training:
            return False
        weight = layer.weight
        if weight is not None and not weight.requires_grad:
            return False
        given = args[0] if args else None
        if not isinstance(given, torch.Tensor) or given.dim() < 2 or given.shape[0] < 2:
            return False
        if not torch.is_grad_enabled():
            return False
        entry.count += 1
        self.active_batch_norm += 1
        return True

    def tell_routine(self) -> None:
        """At the end: how many there were."""
        for entry in self.routine.values():
            if entry.count:
                repeated = ev.BatchNormRepeated(
                    seq=self.trace.tick(), site=entry.site, calls=entry.count
                )
                entry.count = 0
                self.trace.emit(repeated)

    def has_parameters(self, module: nn.Module) -> bool:
        entry = self.trainable.get(id(module))
        if entry is None or entry[0]() is not module:
            found = self.trace.safely(next, parameters_of(module), None) is not None
            entry = self.trainable[id(module)] = weakref.ref(module), found
        return entry[1]


def attach(patches: Patches) -> None:
    """Watches modules for as long as the patches are in place."""
    trace = patches.trace
    calls = ModuleCalls(trace)
    trace.before_end.append(calls.tell_routine)

    def call(original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stack = calls.stack
        if not stack:
            if not calls.has_parameters(self):
                return original(self, *args, **kwargs)
            return _outermost(calls, original, self, args, kwargs)
        known = calls.seen.get(id(self))
        if known is None or known() is not self:
            trace.safely(_first, calls, self)
        if isinstance(self, SENSITIVE) and not (
            isinstance(self, _BatchNorm) and calls.is_routine(self, args)
        ):
            trace.safely(_sensitive, calls, self, args)
        stack.append(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            stack.pop()

    def train(original: Any, self: nn.Module, mode: bool = True) -> nn.Module:
        by_user = calls.mode_depth == 0 and _asked_by_user()
        calls.mode_depth += 1
        try:
            result: nn.Module = original(self, mode)
        finally:
            calls.mode_depth -= 1
        if calls.mode_depth == 0:
            trace.safely(_mode, trace, self, mode, by_user)
        return result

    def enter(original: Any, self: torch.autocast) -> Any:
        if calls.stack and getattr(self, "_enabled", False):
            calls.autocast = getattr(self, "fast_dtype", None)
        return original(self)

    owners: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[nn.Module], str]] = {}

    def register(original: Any, self: nn.Module, name: str, param: Any) -> None:
        original(self, name, param)
        if param is not None:
            trace.safely(_registered, trace, owners, self, name, param)

    patches.around(nn.Module, "register_parameter", register)
    patches.around(nn.Module, "__call__", call)
    patches.around(torch.autocast, "__enter__", enter)
    patches.around(nn.Module, "train", train)
    for name in DROPOUTS:
        patches.around(functional, name, _dropout(calls, name != "alpha_dropout"))
    patches.around(functional, "scaled_dot_product_attention", _attention(calls))
    patches.around(functional, "embedding", _embedding(calls))
    _attach_update_bn(patches)


def _registered(
    trace: Trace,
    owners: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[nn.Module], str]],
    module: nn.Module,
    name: str,
    tensor: torch.Tensor,
) -> None:
    trace.walks.look_closer()
    entry = owners.get(id(tensor))
    first = entry[1]() if entry is not None and entry[0]() is tensor else None
    if entry is None or first is None:
        if len(owners) < MODULES_KEPT:
            owners[id(tensor)] = weakref.ref(tensor), weakref.ref(module), name
    elif first is not module and trace.wants(ev.ParameterShared):
        trace.emit(
            ev.ParameterShared(
                **trace.here(),
                tensor=tensor,
                holders=((first, entry[2]), (module, name)),
            )
        )


def _outermost(calls: ModuleCalls, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    trace = calls.trace
    calls.active_dropout = calls.active_batch_norm = calls.idle = calls.idle_dropout = 0
    calls.autocast = None
    trace.safely(_begin, calls, module, args, kwargs)
    if isinstance(module, SENSITIVE):
        trace.safely(_sensitive, calls, module, args)
    calls.stack.append(module)
    try:
        output = original(module, *args, **kwargs)
    finally:
        calls.stack.pop()
    trace.safely(_end, calls, module, args, kwargs, output)
    return output


def _begin(calls: ModuleCalls, module: nn.Module, args: Any, kwargs: Any) -> None:
    calls.trace.names.know(module)
    if not calls.trace.wants(ev.ForwardBegin):
        return
    calls.trace.emit(
        ev.ForwardBegin(
            **calls.trace.here(),
            module=module,
            training=module.training,
            grad_enabled=torch.is_grad_enabled(),
            arguments=args,
            keywords=kwargs,
        )
    )


def _end(calls: ModuleCalls, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    device = "cpu"
    input_grad = False
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            device = value.device.type
            input_grad = input_grad or (value.requires_grad and value.is_leaf)
    autocast = calls.autocast
    if torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    calls.trace.emit(
        ev.ForwardEnd(
            **calls.trace.here(),
            module=module,
            training=module.training,
            grad_enabled=torch.is_grad_enabled(),
            autocast=autocast,
            arguments=args,
            keywords=kwargs,
            output=output,
            active_dropout=calls.active_dropout,
            active_batch_norm=calls.active_batch_norm,
            idle_sensitive=calls.idle,
            idle_dropout=calls.idle_dropout,
            input_grad=input_grad,
        )
    )


def _first(calls: ModuleCalls, module: nn.Module) -> None:
    if len(calls.seen) >= MODULES_KEPT:
        calls.seen.clear()
    calls.seen[id(module)] = weakref.ref(module)
    root = calls.root
    if root is not None:
        calls.trace.emit(ev.SubmoduleFirstCalled(**calls.trace.here(), module=module, root=root))


def _sensitive(calls: ModuleCalls, module: nn.Module, args: tuple[Any, ...]) -> None:
    if not isinstance(module, _BatchNorm):
        if _dropout_of(module) > 0:
            calls.active_dropout += module.training
            calls.idle += not module.training
            calls.idle_dropout += not module.training
        return
    if not module.training and module.running_mean is not None:
        calls.idle += 1
        return
    calls.active_batch_norm += module.training
    if not module.training or not args or not isinstance(args[0], torch.Tensor):
        return
    shape = args[0].shape
    if len(shape) < 2 or shape[1] == 0:
        return
    site = user_site(3)
    if module.track_running_stats and id(module) not in calls.routine:
        calls.routine[id(module)] = RoutineCalls(module, site)
    calls.trace.emit(
        ev.BatchNormCalled(
            seq=calls.trace.tick(),
            site=site,
            module=module,
            root=calls.root or module,
            batch=shape[0],
            values_per_channel=args[0].numel() // shape[1],
            grad_enabled=torch.is_grad_enabled(),
        )
    )


def _asked_by_user() -> bool:
    # Above are `train` here and the wrapper; `eval()` is torch's own call of `train(False)`.
    try:
        through_eval = sys._getframe(3).f_code is nn.Module.eval.__code__
    except ValueError:
        return False
    return called_by_user(5 if through_eval else 4)


def _dropout_of(module: nn.Module) -> float:
    """The probability with which a layer drops in train mode; 0 for layers that never do."""
    if isinstance(module, _DropoutNd):
        return float(module.p)
    if isinstance(module, nn.RNNBase):
        return float(module.dropout) if module.num_layers > 1 else 0.0
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention) else 0.0


def _mode(trace: Trace, module: nn.Module, mode: bool, by_user: bool) -> None:
    trace.emit(ev.ModeChanged(**trace.here(), module=module, training=bool(mode), by_user=by_user))


def _dropout(calls: ModuleCalls, drops_by_default: bool) -> Any:
    def dropout(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.trace.safely(_dropped, calls, drops_by_default, args[1:], kwargs)
        return original(*args, **kwargs)

    return dropout


def _dropped(calls: ModuleCalls, drops: bool, args: tuple[Any, ...], kwargs: Any) -> None:
    given = dict(zip(("p", "training"), args, strict=False))
    options = {"p": 0.5, "training": drops, **given, **kwargs}
    if options["p"] > 0 and options["training"]:
        _drawn(calls)
    elif options["p"] > 0 and calls.stack and not isinstance(calls.stack[-1], _DropoutNd):
        calls.idle += 1
        calls.idle_dropout += 1


def _attention(calls: ModuleCalls) -> Any:
    def attention(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.trace.safely(_attended, calls, args, kwargs)
        return original(*args, **kwargs)

    return attention


def _attended(calls: ModuleCalls, args: tuple[Any, ...], kwargs: Any) -> None:
    if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0:
        _drawn(calls)


def _drawn(calls: ModuleCalls) -> None:
    root = calls.root
    owner = calls.stack[-1] if calls.stack else None
    if not isinstance(owner, _DropoutNd):
        calls.active_dropout += 1
    # Whether it is registered is worth the search only where it matters.
    registered = root is None or root.training or any(module is owner for module in root.modules())
    calls.trace.emit(
        ev.DropoutCalled(
            **calls.trace.here(),
            owner=owner,
            root=root,
            root_training=root is not None and root.training,
            registered=registered,
            owner_is_dropout=isinstance(owner, _DropoutNd),
        )
    )


def _embedding(calls: ModuleCalls) -> Any:
    def embedding(
        original: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        padding_idx: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        output = original(input, weight, padding_idx, *args, **kwargs)
        calls.trace.safely(_embedded, calls.trace, input, weight, padding_idx)
        return output

    return embedding


def _embedded(trace: Trace, ids: torch.Tensor, weight: torch.Tensor, padding: int | None) -> None:
    if trace.wants(ev.EmbeddingCalled):
        trace.emit(ev.EmbeddingCalled(**trace.here(), ids=ids, weight=weight, padding_idx=padding))


def _attach_update_bn(patches: Patches) -> None:
    trace = patches.trace

    def update(original: Any, loader: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        trace.causes.append("update_bn")
        try:
            original(loader, model, *args, **kwargs)
        finally:
            trace.causes.pop()
        trace.safely(lambda: trace.emit(ev.StatisticsUpdated(**trace.here(), module=model)))

    patches.around(swa_utils, "update_bn", update, rebind=True)
