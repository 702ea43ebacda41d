"""From an optimizer section and a ledger to the optimizer that the update uses.

It never turns `fused` on where it would not run, nor leaves it off without saying why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, cast

import torch
from torch import Tensor

from surefoot.core.errors import ModelError, RequestError
from surefoot.optim.ledger import ParameterLedger
from surefoot.optim.update import UpdateOptimizer

FUSED_DEVICES: Final = frozenset({"cpu", "cuda"})
"""Where torch's fused kernels are verified; on MPS torch calls its own a prototype."""
FUSED_DTYPES: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

Fused = Literal["auto", "on", "off"]


class OptimizerSection(Protocol):
    """What every optimizer section holds."""

    @property
    def kind(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def fused(self) -> Fused: ...


class AdamSection(OptimizerSection, Protocol):
    """Adam and AdamW."""

    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...


class SGDSection(OptimizerSection, Protocol):
    """SGD with momentum; 0 is plain SGD."""

    @property
    def momentum(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class FusedChoice:
    """Whether the fused kernels run, and why."""

    on: bool
    reason: str


def choose_fused(requested: Fused, parameters: Sequence[Tensor]) -> FusedChoice:
    """Whether torch's fused kernels can take these parameters.

    Raises:
        RequestError: they are asked for and cannot run.
    """
    if requested == "off":
        return FusedChoice(False, "optimizer.fused is off")
    devices = {p.device.type for p in parameters}
    dtypes = {p.dtype for p in parameters}
    why_not = ""
    if not devices <= FUSED_DEVICES:
        why_not = f"no verified fused kernel on {', '.join(sorted(devices - FUSED_DEVICES))}"
    elif not dtypes <= FUSED_DTYPES:
        why_not = f"no fused kernel for {', '.join(sorted(map(str, dtypes - FUSED_DTYPES)))}"
    if not why_not:
        return FusedChoice(True, f"one kernel a group on {', '.join(sorted(devices))}")
    if requested == "on":
        raise RequestError(
            f"optimizer.fused is on, but there is {why_not}",
            where="optimizer.fused",
            rule="an option that would do nothing is refused",
            remedy="use optimizer.fused=auto",
        )
    return FusedChoice(False, why_not)


def _adamw(section: Any, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
    """AdamW: `w -= lr * weight_decay * w`, apart from the moments.

    The decay is multiplied by the current rate, so it follows the schedule (torch's form); it does
    not enter the moments, which is what sets it apart from Adam with L2 (1711.05101).
    """
    adam = cast(AdamSection, section)
    return torch.optim.AdamW(
        groups, lr=adam.lr, betas=(adam.betas[0], adam.betas[1]), eps=adam.eps, **_kernel(fused)
    )


def _adam(section: Any, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
    """Adam with bias correction; a weight decay is L2 in the gradient, as torch's Adam has it."""
    adam = cast(AdamSection, section)
    return torch.optim.Adam(
        groups, lr=adam.lr, betas=(adam.betas[0], adam.betas[1]), eps=adam.eps, **_kernel(fused)
    )


def _sgd(section: Any, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
    """SGD: `v = momentum * v + g`, `w -= lr * v` (Nesterov: `w -= lr * (g + momentum * v)`)."""
    sgd = cast(SGDSection, section)
    return torch.optim.SGD(
        groups, lr=sgd.lr, momentum=sgd.momentum, nesterov=sgd.nesterov, **_kernel(fused)
    )


def _kernel(fused: bool) -> dict[str, bool]:
    return {"fused": True} if fused else {"foreach": True}


_BUILDERS: Final[
    dict[str, Callable[[Any, list[dict[str, Any]], bool], torch.optim.Optimizer]]
] = {"adamw": _adamw, "adam": _adam, "sgd": _sgd}


def build_optimizer(
    section: OptimizerSection,
    ledger: ParameterLedger,
    device: torch.device | str,
    skipping: bool,
) -> UpdateOptimizer:
    """Builds the optimizer of `section` over the groups of `ledger`.

    Args:
        section: kind, rate and hyper-parameters; decay and multipliers are in the ledger.
        ledger: the groups.
        device: where the run computes; the parameters are there already.
        skipping: whether non-finite updates must be left out (fp16, or a guard that skips).

    Raises:
        RequestError: an unknown kind, or `fused: on` where it cannot run.
        ModelError: a parameter is not on `device`.
    """
    if section.kind not in _BUILDERS:
        raise RequestError(
            f"unknown optimizer '{section.kind}'",
            where="optimizer.kind",
            rule=f"one of {', '.join(sorted(_BUILDERS))}",
            remedy="`surefoot show optimizers` lists them",
        )
    _refuse_elsewhere(ledger, torch.device(device))
    fused = choose_fused(section.fused, ledger.parameters)
    optimizer = _BUILDERS[section.kind](section, ledger.groups(), fused.on)
    kernel = f"{'fused' if fused.on else 'foreach'}: {fused.reason}"
    return UpdateOptimizer(optimizer, skipping=skipping, kernel=kernel)


def _refuse_elsewhere(ledger: ParameterLedger, device: torch.device) -> None:
    elsewhere = [
        f"{row.name} on {parameter.device}"
        for row, parameter in zip(ledger.rows, ledger.parameters, strict=True)
        if parameter.device.type != device.type
    ]
    if elsewhere:
        raise ModelError(
            f"{len(elsewhere)} parameters are not on {device}",
            where=", ".join(elsewhere[:5]),
            rule="the optimizer is built when the model is on its device",
            remedy=f"call model.to('{device}') first",
        )
