"""Loss scaling for fp16: none, static, or dynamic. All of it happens on the device.

It never waits for the device and never decides whether an update is applied: the finite flag
does, and the scale follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.core.errors import CheckpointError, RequestError


class LossScale(Protocol):
    """What the update asks of a loss scale, in this order."""

    @property
    def value(self) -> Tensor | float:
        """The scale now in use: a host number where it never changes, else 0-dim float32.

        A tensor handed out is never changed afterwards.
        """
        ...

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on: `loss * value`."""
        ...

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Multiplies gradients by `1 / value`, in place."""
        ...

    def update(self, finite: Callable[[], Tensor]) -> None:
        """Follows the flag (0-dim bool) of the update; only a dynamic scale asks for it."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class NoLossScale:
    """For fp32, TF32 and bf16: their exponent range needs no scaling."""

    value = 1.0

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        return None

    def update(self, finite: Callable[[], Tensor]) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "none"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _same_kind("none", state)


class StaticLossScale:
    """A fixed scale. A non-finite update is skipped by its flag; the scale stays.

    Args:
        value: the scale, > 0. A power of two makes scaling exact.
        device: where the losses are.

    Raises:
        RequestError: the value is not positive and finite.
    """

    def __init__(self, value: float, device: torch.device | str = "cpu") -> None:
        self.value = _positive(value, "precision.loss_scale")
        self._scale = torch.tensor(self.value, device=device)
        self._inverse = _inverse(self._scale)

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        _multiply_(gradients, self._inverse)

    def update(self, finite: Callable[[], Tensor]) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "static"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks the kind only: the value is the recipe's."""
        _same_kind("static", state)


class DynamicLossScale:
    """Shrinks the scale after an overflow and grows it after `growth_interval` good updates.

    The sequence of scales is that of `torch.amp.GradScaler`: on a non-finite update
    `scale *= backoff` and the count of good updates starts anew; after `growth_interval`
    consecutive finite updates `scale *= growth`, unless that would be infinite.

    Args:
        initial: first scale.
        growth: factor > 1.
        backoff: factor in (0, 1).
        growth_interval: consecutive finite updates before the scale grows.
        device: where the losses are.

    Raises:
        RequestError: a value is out of range.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        device: torch.device | str = "cpu",
    ) -> None:
        _positive(initial, "initial loss scale")
        if not (growth > 1.0 and 0.0 < backoff < 1.0 and growth_interval >= 1):
            raise RequestError(
                f"growth {growth}, backoff {backoff}, growth_interval {growth_interval}",
                where="dynamic loss scale",
                rule="growth > 1, 0 < backoff < 1, growth_interval >= 1",
                remedy="the usual values are 2, 0.5 and 2000",
            )
        self.growth = growth
        self.backoff = backoff
        self.growth_interval = growth_interval
        self._value = torch.tensor(float(initial), dtype=torch.float32, device=device)
        self._good_updates = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def value(self) -> Tensor:
        return self._value

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._value

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        _multiply_(gradients, _inverse(self._value))

    def update(self, finite: Callable[[], Tensor]) -> None:
        # A fresh tensor: the report of this update still holds the scale that it used.
        following = self._value.clone()
        overflow = finite().logical_not().to(device=following.device, dtype=torch.float32)
        torch._amp_update_scale_(
            following, self._good_updates, overflow, self.growth, self.backoff, self.growth_interval
        )
        self._value = following

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "dynamic", "value": self._value, "good_updates": self._good_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores scale and count; growth, backoff and interval are the recipe's.

        Raises:
            CheckpointError: the state is of another kind of loss scale.
        """
        _same_kind("dynamic", state)
        self._value = state["value"].to(self._value.device, copy=True)
        self._good_updates = state["good_updates"].to(self._good_updates.device, copy=True)


def _multiply_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    for gradient in gradients:
        if gradient.dtype == torch.float16:
            raise RequestError(
                "gradients are float16: unscaled they would underflow",
                where=f"a gradient of shape {tuple(gradient.shape)}",
                rule="under fp16 autocast the parameters and their gradients are float32",
                remedy="keep the model in float32 (model.float()); autocast does the rest",
            )
    if gradients:
        torch._foreach_mul_(list(gradients), factor)


def _inverse(value: Tensor) -> Tensor:
    # The reciprocal in float64, rounded once, as GradScaler does; MPS has no float64.
    return value.reciprocal() if value.device.type == "mps" else value.double().reciprocal().float()


def _positive(value: float, what: str) -> float:
    if math.isfinite(value) and value > 0:
        return float(value)
    raise RequestError(
        f"{what} is {value}",
        where=what,
        rule="a loss scale is positive and finite",
        remedy="1024 is a usual static value, 65536 a usual start of a dynamic one",
    )


def _same_kind(kind: str, state: Mapping[str, Any]) -> None:
    if state["kind"] != kind:
        raise CheckpointError(
            f"the checkpoint holds a loss scale of kind '{state['kind']}', this run '{kind}'",
            where="loss_scale",
            rule="a resume keeps the kind of loss scale",
            remedy="resume with the precision section of that run",
        )
