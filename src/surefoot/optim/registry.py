"""Builds the optimizer of a run from its section and a ledger; defines our own optimizers.

An optimizer is a function of parameter groups, found by name or target in the registry of
`surefoot.core.doors`, like those of other packages. `fused` is enabled only where it is verified,
with the reason where it is off; weights of too low a precision are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from surefoot.core.doors import GIVEN, Door, find_part, handed_in, label_of
from surefoot.core.errors import ModelError, RequestError
from surefoot.optim.ledger import ParameterLedger, first_few
from surefoot.optim.master_weights import LowPrecisionWeights, master_groups
from surefoot.optim.own import Groups, MakeOptimizer, make_over_groups
from surefoot.optim.update import UpdateOptimizer

FUSED_DEVICES: Final = frozenset({"cpu", "cuda"})
"""Devices on which torch's fused kernels are verified; torch calls those on MPS a prototype."""
FUSED_DTYPES: Final = frozenset({torch.float64, torch.float32})
NO_FUSED_SHARDS: Final = frozenset({"sgd"})
"""Kinds whose fused kernel does not support DTensors."""
USUAL_DECAY: Final = (0.01, 0.1)
"""Range of AdamW's weight decay in published recipes."""
LARGEST_USUAL_BETA2: Final = 0.999

Fused = Literal["auto", "on", "off"]


class OptimizerSection(Protocol):
    """What every optimizer section holds; the decay and the groups are the ledger's.

    One of torch's optimizers also has `fused`, one of another's `target`.
    """

    @property
    def kind(self) -> str: ...
    @property
    def lr(self) -> float: ...
    def hyper_parameters(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class FusedChoice:
    """Whether the fused kernels are used, and why."""

    on: bool
    reason: str


def choose_fused(requested: Fused, parameters: Sequence[Tensor], kind: str = "") -> FusedChoice:
    """Whether torch's fused kernels support these parameters.

    Args:
        kind: of the optimizer; fused SGD does not support sharded parameters.

    Raises:
        RequestError: they are requested and not supported.
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
    elif kind in NO_FUSED_SHARDS and any(hasattr(p, "device_mesh") for p in parameters):
        why_not = f"no fused {kind} kernel for sharded parameters"
    if not why_not:
        return FusedChoice(True, f"one kernel a group on {', '.join(sorted(devices))}")
    if requested == "on":
        raise RequestError(
            f"optimizer.fused is on, but there is {why_not}",
            where="optimizer.fused",
            rule="an option without effect is refused",
            remedy="use optimizer.fused=auto",
        )
    return FusedChoice(False, why_not)


def adamw(
    groups: Groups, *, lr: float, betas: tuple[float, float], eps: float, fused: bool
) -> torch.optim.Optimizer:
    """AdamW: the decay `w -= lr * weight_decay * w` is separate from gradient and moments.

    It is multiplied by the current rate and so follows the schedule (torch's form; values for other
    forms differ). Unlike L2 in the loss, it does not enter the moments, where Adam's second moment
    would rescale it parameter by parameter (1711.05101).
    """
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, **_kernel(fused))


def adam(
    groups: Groups, *, lr: float, betas: tuple[float, float], eps: float, fused: bool
) -> torch.optim.Optimizer:
    """Adam with bias correction (1412.6980); weight decay is L2: `g += weight_decay * w`."""
    return torch.optim.Adam(groups, lr=lr, betas=betas, eps=eps, **_kernel(fused))


def sgd(
    groups: Groups, *, lr: float, momentum: float, nesterov: bool, fused: bool
) -> torch.optim.Optimizer:
    """SGD: `g += weight_decay * w`, `v = momentum * v + g`, `w -= lr * v`; momentum 0 is plain SGD.

    Nesterov's form takes `w -= lr * (g + momentum * v)`.
    """
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, **_kernel(fused))


def _kernel(fused: bool) -> dict[str, Any]:
    return {"fused": True} if fused else {"foreach": True}


def build_optimizer(
    section: OptimizerSection,
    ledger: ParameterLedger,
    device: torch.device | str,
    skipping: bool,
    low_precision_weights: LowPrecisionWeights = "refuse",
    given: MakeOptimizer | None = None,
) -> UpdateOptimizer:
    """Builds the optimizer of `section` over the groups of `ledger`.

    Args:
        section: kind, rate and hyper-parameters.
        ledger: the groups, with decay and rate multipliers.
        device: of the parameters, which are there already.
        skipping: whether non-finite updates must be skipped (fp16, or a guard that skips).
        low_precision_weights: for bf16 weights: refuse, or step float32 copies.
        given: the class or function that was handed in, where the section says so.

    Raises:
        RequestError: an unknown kind, `fused: on` where it cannot run, or an optimizer of another's
            that cannot be used.
        ModelError: a parameter is not on `device`, or its precision is too low for training.
    """
    found, name = _named(section, given)
    _refuse_elsewhere(ledger, torch.device(device))
    groups, masters = master_groups(ledger, low_precision_weights)
    arguments, kernel = dict(section.hyper_parameters()), "as the optimizer was made"
    requested: Fused | None = getattr(section, "fused", None)
    if requested is not None:
        stepped = [p for group in groups for p in group["params"]]
        fused = choose_fused(requested, stepped, section.kind)
        arguments["fused"] = fused.on
        kernel = f"{'fused' if fused.on else 'foreach'}: {fused.reason}"
    return UpdateOptimizer(
        make_over_groups(found, groups, section.lr, arguments, name),
        skipping=skipping,
        kernel=kernel,
        masters=masters,
    )


def _named(section: Any, given: MakeOptimizer | None) -> tuple[Any, str]:
    """The class or function that a section names, and what messages call it."""
    if section.kind == GIVEN:
        return handed_in(given, "optimizer", section.target), section.target
    return find_part(Door.OPTIMIZERS, section, "optimizer"), label_of(Door.OPTIMIZERS, section)


def optimizer_notes(section: OptimizerSection, ledger: ParameterLedger) -> tuple[str, ...]:
    """Unusual values of this choice, one sentence each; for a check, never an error."""
    notes = []
    decays = sorted({row.weight_decay for row in ledger.rows if row.weight_decay > 0})
    if section.kind == "adamw":
        low, high = USUAL_DECAY
        notes += [
            f"weight decay {decay:g} is outside the usual {low:g} to {high:g} of AdamW"
            for decay in decays
            if not low <= decay <= high
        ]
    beta2 = getattr(section, "betas", (0.0, 0.0))[1]
    if beta2 > LARGEST_USUAL_BETA2:
        notes.append(
            f"beta2 {beta2:g} averages over {1 / (1 - beta2):,.0f} updates; usual are 0.95 to "
            f"{LARGEST_USUAL_BETA2:g}"
        )
    if section.kind == "adam" and decays:
        notes.append(
            "Adam's weight decay is L2 in the gradient and is rescaled by the second moment; "
            "AdamW's is not"
        )
    return tuple(notes)


def _refuse_elsewhere(ledger: ParameterLedger, device: torch.device) -> None:
    elsewhere = [
        f"{row.name} on {parameter.device}"
        for row, parameter in zip(ledger.rows, ledger.parameters, strict=True)
        if parameter.device.type != device.type
    ]
    if elsewhere:
        raise ModelError(
            f"{len(elsewhere)} parameters are not on {device}",
            where=first_few(elsewhere),
            rule="the model is on its device when the optimizer is built",
            remedy=f"call model.to('{device}') first",
        )
