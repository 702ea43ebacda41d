"""Wraps a torch optimizer for the update: sets rates, and skips a non-finite update.

Decides no rate and reads nothing back from the device unless `skips` says so: `skips` states how an
update is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from surefoot.core.errors import CheckpointError, ModelError, RequestError
from surefoot.core.schedules import Schedule
from surefoot.optim.ledger import first_few
from surefoot.optim.master_weights import NO_MASTERS, MasterWeights
from surefoot.optim.state_on_host import StateOnHost

SKIPPING_DEVICES: Final = frozenset({"cpu", "cuda"})
"""Devices on which the fused kernels are verified to change nothing on a non-finite flag."""
_FUSED_SKIPPERS: Final = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_SCHEDULED: Final = frozenset({"lr", "momentum", "betas"})
"""Group values that `set_rate` sets: they belong to the schedule, not to the state."""
_STATE_KEYS: Final = frozenset({"state", "param_groups"})
_NAMES: Final = frozenset({"params", "name", "parameter_names", "lr_multiplier", "base_lr"})


class SkipKind(Enum):
    """How a non-finite update is skipped."""

    ON_DEVICE = "on_device"
    """The fused kernel reads the flag; the host does not wait."""
    ON_HOST = "on_host"
    """The host waits for the flag once per update, then steps or not."""
    NEVER = "never"
    """The update is applied regardless of the flag; the run stops afterwards."""


class PlateauVerdict(Protocol):
    """What a plateau rule has decided so far."""

    verdict: Any
    """Multiplier of the rate; 1.0 where there is no such rule."""


class Course:
    """The learning rate's course: the schedule times what the plateau rule has decided."""

    def __init__(self, schedule: Schedule, plateau: PlateauVerdict) -> None:
        self.schedule = schedule
        self._plateau = plateau

    def __call__(self, step: int) -> tuple[float, float | None]:
        """(multiplier of the peak rate, momentum or None) of the update after `step` updates."""
        return self.schedule(step) * self._plateau.verdict, self.schedule.momentum(step)


class UpdateOptimizer:
    """A torch optimizer whose groups have `name` and `parameter_names`.

    Learning rates are plain floats: `base_lr * multiplier * lr_multiplier` of the group, set before
    each step. `base_lr` is the initial `lr` of the group.

    Args:
        optimizer: a torch optimizer; its groups have `name`, `parameter_names` (one per parameter)
            and optionally `lr_multiplier`.
        skipping: whether a non-finite update must be skipped (fp16, or a guard that skips). An
            optimizer that can skip on the device always does; any other waits for the flag if this
            is true.
        kernel: which kernels run and why, for the record.
        masters: float32 copies that the optimizer steps in place of low-precision weights.

    Raises:
        ModelError: a group has no names, or a name occurs twice.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        skipping: bool,
        kernel: str = "as the optimizer was made",
        masters: MasterWeights = NO_MASTERS,
    ) -> None:
        self.optimizer = optimizer
        self.kernel = kernel
        self._masters = masters
        self._stepped = _stepped_by_name(optimizer)
        self._parameters = tuple(map(self._masters.model_weight, self._stepped.values()))
        self._device = self._parameters[0].device
        self.skips = _skip_kind(optimizer, skipping)
        for group in optimizer.param_groups:
            group.setdefault("lr_multiplier", 1.0)
            group["base_lr"] = float(group["lr"])
        self._as_made = [_plain_values(group) for group in optimizer.param_groups]
        self._found_inf = torch.zeros((), dtype=torch.float32, device=self._device)
        self._on_host: StateOnHost | None = None
        self._steps_elsewhere = any(map(masters.is_master, self._stepped.values()))
        _allocate_momentum(optimizer)

    def keep_state_on_host(self) -> None:
        """From now on keeps the state in host memory between steps."""
        self._on_host = StateOnHost(self.optimizer, self._device)
        self._on_host.rest()
        self._steps_elsewhere = True

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The model's parameters, in group order."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """The gradients that exist, in group order."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def zero_grad(self) -> None:
        """Sets every gradient to None, freeing its memory."""
        for parameter in self._parameters:
            parameter.grad = None

    def set_rate(self, multiplier: float, momentum: float | None = None) -> None:
        """Sets each group's rate for the next step.

        Args:
            multiplier: of the peak rate, from the schedule.
            momentum: SGD's momentum or Adam's first beta, if there is one; None leaves it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * multiplier * group["lr_multiplier"]
            if momentum is not None:
                _set_momentum(group, momentum)

    def rates(self) -> dict[str, float]:
        """Group name to the rate of the next (or last) step."""
        return {group["name"]: group["lr"] for group in self.optimizer.param_groups}

    def step(self, finite: Callable[[], Tensor], known: bool | None = None) -> None:
        """One step with the gradients that exist.

        Args:
            finite: returns a 0-dim bool tensor. If it is false, nothing changes: no weight, no
                moment, no step count (except for `SkipKind.NEVER`). Called only if needed.
            known: the same on the host, if it has arrived already: then the kernels need not read
                the flag, which saves launches where the device waits for the host. Weights are
                bit-equal either way.
        """
        if self.skips is SkipKind.ON_HOST and known is None:
            known = bool(finite())
        if self.skips is not SkipKind.NEVER and known is False:
            return
        if self.skips is SkipKind.ON_DEVICE:
            self.optimizer.found_inf = None if known else self._flag(finite())  # type: ignore[attr-defined]
        if self._steps_elsewhere:
            self._step_elsewhere()
        else:
            self.optimizer.step()

    def _step_elsewhere(self) -> None:
        """A step of float32 copies of the weights, or with state that rests on the host."""
        self._masters.take_gradients()
        with self._on_host.brought() if self._on_host else nullcontext():
            self.optimizer.step()
        self._masters.publish()
        self._masters.drop_gradients()

    def _flag(self, finite: Tensor) -> Tensor:
        """The flag of fused kernels: 1.0 leaves weights, moments and step counts unchanged."""
        return torch.logical_not(_on(finite, self._device), out=self._found_inf)

    def state_by_name(self) -> dict[str, Any]:
        """The state to keep, by parameter name: live tensors and plain values.

        Rates and hyper-parameters are the recipe's and not part of it; a group value that the
        optimizer itself has changed since construction (a counter) is.
        """
        if self._on_host:
            self._on_host.settle()
        state = self.optimizer.state
        return {
            "kind": type(self.optimizer).__name__,
            "shapes": self._shapes(),
            "parameters": {n: dict(state[p]) for n, p in self._stepped.items() if p in state},
            "masters": {n: p for n, p in self._stepped.items() if self._masters.is_master(p)},
            "groups": {
                group["name"]: _counters(as_made, _plain_values(group)) | _tensors(group)
                for group, as_made in zip(self.optimizer.param_groups, self._as_made, strict=True)
            },
            **self._further_state(),
        }

    def _further_state(self) -> dict[str, Any]:
        """What an optimizer that writes its own `state_dict` keeps besides torch's two keys."""
        if type(self.optimizer).state_dict is torch.optim.Optimizer.state_dict:
            return {}
        kept = self.optimizer.state_dict()
        further = {key: value for key, value in kept.items() if key not in _STATE_KEYS}
        return {"further": further} if further else {}

    def load_state_by_name(self, state: Mapping[str, Any]) -> None:
        """Loads the result of `state_by_name`. Tensors are copied.

        Raises:
            CheckpointError: the state is of another optimizer or other parameters.
        """
        self._refuse_other(state)
        if self._on_host:
            self._on_host.settle()
        if "further" in state:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), **state["further"]})
        held = self.optimizer.state
        held.clear()
        for group in self.optimizer.param_groups:
            for name, parameter in zip(group["parameter_names"], group["params"], strict=True):
                if name in state["parameters"]:
                    held[parameter] = {
                        key: _placed(key, value, parameter, group)
                        for key, value in state["parameters"][name].items()
                    }
            for key, value in state["groups"].get(group["name"], {}).items():
                is_tensor = isinstance(value, Tensor)
                group[key] = value.to(self._device, copy=True) if is_tensor else value
        with torch.no_grad():
            for name, master in state["masters"].items():
                self._stepped[name].copy_(master)
        _allocate_momentum(self.optimizer)
        if self._on_host:
            self._on_host.rest()

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for name, parameter in self._stepped.items()}

    def _refuse_other(self, state: Mapping[str, Any]) -> None:
        kind = type(self.optimizer).__name__
        if state["kind"] != kind:
            raise CheckpointError(
                f"the checkpoint holds the state of {state['kind']}, this run uses {kind}",
                where="optimizer",
                rule="a resume keeps the optimizer",
                remedy="resume with the optimizer section of that run",
            )
        ours, theirs = self._shapes(), state["shapes"]
        wrong = [
            f"{name}: checkpoint {theirs.get(name, 'missing')}, run {ours.get(name, 'missing')}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        masters = {n for n, p in self._stepped.items() if self._masters.is_master(p)}
        wrong += [
            f"{name}: a float32 copy on one side only"
            for name in sorted(masters ^ state["masters"].keys())
        ]
        if wrong:
            raise CheckpointError(
                f"the optimizer state is of other parameters: {len(wrong)} differ",
                where=first_few(wrong),
                rule="a resume trains the same parameters, by name, shape and precision",
                remedy="keep the model and its frozen parameters as they were",
            )


def _stepped_by_name(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names: dict[str, Tensor] = {}
    group_names = [group.get("name") for group in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        listed: Sequence[str] = group.get("parameter_names", ())
        if "name" not in group or len(listed) != len(group["params"]):
            raise _bad_group(index, "it has no parameter_names")
        if group_names.index(group["name"]) != index:
            raise _bad_group(index, f"an earlier group is named '{group['name']}' , too")
        for name, parameter in zip(listed, group["params"], strict=True):
            if name in names:
                raise _bad_group(index, f"{name} is named in two places")
            names[name] = parameter
    return names


def _bad_group(index: int, what: str) -> ModelError:
    return ModelError(
        f"parameter group {index} cannot be used: {what}",
        where=f"param_groups[{index}]",
        rule="a group has `name` and `parameter_names`, one per parameter",
        remedy="use ParameterLedger.build(model, ...).groups(), or name_groups(model, groups)",
    )


def _skip_kind(optimizer: torch.optim.Optimizer, skipping: bool) -> SkipKind:
    groups = optimizer.param_groups
    fused = type(optimizer) in _FUSED_SKIPPERS and all(group.get("fused") for group in groups)
    on_device = {p.device.type for group in groups for p in group["params"]} <= SKIPPING_DEVICES
    # Damped momentum differs in its first step, so its buffers cannot be allocated beforehand.
    damped = any(group.get("dampening", 0) != 0 for group in groups)
    if fused and on_device and not damped:
        return SkipKind.ON_DEVICE
    return SkipKind.ON_HOST if skipping else SkipKind.NEVER


def _allocate_momentum(optimizer: torch.optim.Optimizer) -> None:
    # By default fused SGD allocates uninitialized buffers in the first step, and a skip would keep
    # them. From zero, `v = momentum * v + g` gives torch's own first value, g.
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["momentum"] != 0 and group["dampening"] == 0:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    if "betas" in group:
        group["betas"] = (momentum, group["betas"][1])
    elif group.get("momentum", 0) != 0:
        group["momentum"] = momentum
    else:
        raise RequestError(
            f"group {group['name']} has no momentum for a schedule to set",
            where="schedule",
            rule="a momentum schedule needs an optimizer with momentum",
            remedy="set optimizer.momentum above 0, or use a schedule of the rate alone",
        )


def _plain_values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in group.items()
        if key not in _NAMES and isinstance(value, (bool, int, float, str, tuple))
    }


def _tensors(group: Mapping[str, Any]) -> dict[str, Tensor]:
    """What an optimizer keeps in a group as a tensor, such as an estimate of the rate."""
    return {key: value for key, value in group.items() if isinstance(value, Tensor)}


def _counters(as_made: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in now.items()
        if key not in _SCHEDULED and as_made.get(key) != value
    }


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    # torch keeps the step count of non-fused kernels on the host.
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    placed = value.to("cpu" if on_host else parameter.device, copy=True)
    if placed.shape != parameter.shape or placed.stride() == parameter.stride():
        return placed
    # A fused kernel goes through memory in order: a moment must lie as its weight does.
    return torch.empty_like(parameter, dtype=placed.dtype).copy_(placed)


def _on(flag: Tensor, device: torch.device) -> Tensor:
    return flag if flag.device == device else flag.to(device)
