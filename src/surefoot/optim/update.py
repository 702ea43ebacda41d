"""A torch optimizer as the update sees it: rates are set, and a non-finite update does nothing.

It never decides a rate, never reads a number back from the device unless its `skips` says so, and
never makes `step` mean "perhaps" in silence: `skips` says how a skip happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor

from surefoot.core.errors import CheckpointError, ModelError

_FUSED_SKIPPERS: Final = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""torch optimizers whose fused kernels leave everything alone where `found_inf` is 1."""
_SKIPPING_DEVICES: Final = frozenset({"cpu", "cuda"})
"""Where that is verified."""
_OURS: Final = frozenset({"params", "name", "parameter_names", "lr_multiplier", "base_lr", "lr"})


class SkipKind(Enum):
    """How a non-finite update is left out."""

    ON_DEVICE = "on_device"
    """The fused kernel reads the flag; the host does not wait."""
    ON_HOST = "on_host"
    """The host waits for the flag once an update, then steps or not."""
    NEVER = "never"
    """The update is applied whatever the flag says; the run stops afterwards."""


class UpdateOptimizer:
    """Wraps a torch optimizer whose groups carry `name` and `parameter_names`.

    Learning rates are plain floats: `base_lr * multiplier * lr_multiplier` of the group, set before
    each step. `base_lr` is the `lr` that the group was made with.

    Args:
        optimizer: a torch optimizer; its groups hold `name`, `parameter_names` (one a parameter)
            and may hold `lr_multiplier`.
        skipping: whether a non-finite update must be left out (fp16, or a guard that skips). An
            optimizer that can skip on the device always does; any other waits for the flag where
            this is true.
        kernel: which kernels run and why, for the record.

    Raises:
        ModelError: a group lacks its names, or a name occurs twice.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, skipping: bool, kernel: str = "as given"
    ) -> None:
        self.optimizer = optimizer
        self.kernel = kernel
        self._names = _names_of(optimizer)
        self._parameters = tuple(self._names.values())
        self._device = self._parameters[0].device
        self.skips = _skip_kind(optimizer, skipping)
        for group in optimizer.param_groups:
            group.setdefault("lr_multiplier", 1.0)
            group["base_lr"] = float(group["lr"])
        self._initial = [_plain_values(group) for group in optimizer.param_groups]
        if self.skips is SkipKind.ON_DEVICE:
            self._found_inf = torch.zeros((), device=self._device)
            optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
        if isinstance(optimizer, torch.optim.SGD):
            _allocate_momentum(optimizer)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Every parameter of every group, in group order."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """The gradients that are there, in group order."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def zero_grad(self) -> None:
        """Sets every gradient to None, which frees its memory."""
        for parameter in self._parameters:
            parameter.grad = None

    def set_rate(self, multiplier: float, momentum: float | None = None) -> None:
        """Sets each group's rate for the next step.

        Args:
            multiplier: of the peak rate, from the schedule.
            momentum: SGD's momentum or Adam's first beta; None leaves it as it is.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * multiplier * group["lr_multiplier"]
            if momentum is not None:
                if "betas" in group:
                    group["betas"] = (momentum, group["betas"][1])
                else:
                    group["momentum"] = momentum

    def rates(self) -> dict[str, float]:
        """Group name to the rate that the next (or last) step uses."""
        return {group["name"]: group["lr"] for group in self.optimizer.param_groups}

    def step(self, finite: Tensor) -> None:
        """One step with the gradients that are there.

        Args:
            finite: 0-dim bool tensor. Where it is false, nothing changes: no weight, no moment, no
                step count (but for `SkipKind.NEVER`).
        """
        if self.skips is SkipKind.ON_DEVICE:
            if finite.device != self._device:
                finite = finite.to(self._device)
            torch.logical_not(finite, out=self._found_inf)
        elif self.skips is SkipKind.ON_HOST and not bool(finite):
            return
        self.optimizer.step()

    def state_by_name(self) -> dict[str, Any]:
        """Everything that must survive, keyed by parameter name: tensors (live) and plain values.

        Rates and hyper-parameters are the recipe's and are not kept; a group value that the
        optimizer itself has changed since it was made (a counter) is.
        """
        state = self.optimizer.state
        return {
            "kind": type(self.optimizer).__name__,
            "shapes": {name: list(p.shape) for name, p in self._names.items()},
            "parameters": {name: dict(state[p]) for name, p in self._names.items() if p in state},
            "groups": {
                group["name"]: _changed(initial, _plain_values(group))
                for group, initial in zip(self.optimizer.param_groups, self._initial, strict=True)
            },
        }

    def load_state_by_name(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_by_name` gave. Tensors are copied.

        Raises:
            CheckpointError: the state is of another optimizer or of other parameters.
        """
        self._refuse_other(state)
        held = self.optimizer.state
        held.clear()
        for group in self.optimizer.param_groups:
            for name, parameter in zip(group["parameter_names"], group["params"], strict=True):
                if name in state["parameters"]:
                    held[parameter] = {
                        key: _placed(key, value, parameter, group)
                        for key, value in state["parameters"][name].items()
                    }
            group.update(state["groups"].get(group["name"], {}))
        if isinstance(self.optimizer, torch.optim.SGD):
            _allocate_momentum(self.optimizer)

    def _refuse_other(self, state: Mapping[str, Any]) -> None:
        kind = type(self.optimizer).__name__
        if state["kind"] != kind:
            raise CheckpointError(
                f"the checkpoint holds the state of {state['kind']}, this run uses {kind}",
                where="optimizer",
                rule="a resume keeps the optimizer",
                remedy="resume with the optimizer section of that run",
            )
        ours = {name: list(p.shape) for name, p in self._names.items()}
        theirs = state["shapes"]
        wrong = [
            f"{name}: checkpoint {theirs.get(name, 'missing')}, run {ours.get(name, 'missing')}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(
                f"the optimizer state is of other parameters: {len(wrong)} differ",
                where="; ".join(wrong[:5]) + more,
                rule="a resume trains the same parameters, by name and shape",
                remedy="keep the model and what is frozen as they were",
            )


def _names_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names: dict[str, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        listed: Sequence[str] = group.get("parameter_names", ())
        if "name" not in group or len(listed) != len(group["params"]):
            raise ModelError(
                f"parameter group {index} does not name its parameters",
                where=f"param_groups[{index}]",
                rule="a group holds `name` and `parameter_names`, one for each parameter",
                remedy="build the groups with ParameterLedger.build(model, ...).groups()",
            )
        for name, parameter in zip(listed, group["params"], strict=True):
            if name in names:
                raise ModelError(
                    f"two parameters are named {name}",
                    where=f"param_groups[{index}]",
                    rule="each trainable parameter is in exactly one group",
                    remedy="build the groups with ParameterLedger.build(model, ...).groups()",
                )
            names[name] = parameter
    return names


def _skip_kind(optimizer: torch.optim.Optimizer, skipping: bool) -> SkipKind:
    fused = all(group.get("fused") for group in optimizer.param_groups)
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    if type(optimizer) in _FUSED_SKIPPERS and fused and devices <= _SKIPPING_DEVICES:
        return SkipKind.ON_DEVICE
    return SkipKind.ON_HOST if skipping else SkipKind.NEVER


def _allocate_momentum(optimizer: torch.optim.SGD) -> None:
    # Left to itself, fused SGD allocates uninitialised buffers in its first step and a skip would
    # keep them. From zero, `v = momentum * v + g` is torch's own first value, g (dampening 0).
    for group in optimizer.param_groups:
        if group["momentum"] != 0 and group["dampening"] == 0:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)


def _plain_values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in group.items()
        if key not in _OURS and isinstance(value, (bool, int, float, str, tuple))
    }


def _changed(initial: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    scheduled = ("momentum", "betas")
    return {
        key: value
        for key, value in now.items()
        if key not in scheduled and initial.get(key) != value
    }


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.to("cpu" if on_host else parameter.device, copy=True)
