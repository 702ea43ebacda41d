"""What matrix products are computed in: fp32, TF32, bf16 or fp16, chosen once and said aloud.

It never changes the dtype of a parameter: under autocast parameters, their gradients and the
update stay float32, and only activations and their gradients are narrow. It never falls back in
silence: what a device cannot do is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, get_args

import torch

from surefoot.core.errors import RequestError
from surefoot.numerics.hardware import Hardware, probe_hardware

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]
RequestedPrecision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]

SUITED_TO: Final[dict[str, PrecisionName]] = {"cuda": "bf16", "cpu": "bf16", "mps": "fp16"}
"""Autocast precision that suits each device type; a type that is not here has no autocast."""

_COMPUTE_DTYPES: Final = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Precision:
    """A choice of precision, and why."""

    name: PrecisionName
    compute_dtype: torch.dtype
    """Dtype of matrix products and convolutions under autocast."""
    device_type: str
    needs_loss_scale: bool
    """True for fp16 and for nothing else."""
    reason: str
    """Why this one, in one sentence for the record."""

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes the context of a forward pass and its loss; an empty one for fp32 and TF32."""
        if self.compute_dtype == torch.float32:
            return nullcontext
        return partial(torch.autocast, self.device_type, dtype=self.compute_dtype)


def choose_precision(requested: RequestedPrecision, device: torch.device | str) -> Precision:
    """The precision for `device` on this machine. See `decide_precision`.

    Raises:
        RequestError: the device cannot do what is requested.
    """
    precision = decide_precision(requested, probe_hardware(device))
    _prove_autocast(precision, torch.device(device))
    return precision


def decide_precision(requested: RequestedPrecision, hardware: Hardware) -> Precision:
    """A pure function from the request and the hardware's facts.

    `auto` takes bf16 on a GPU with bf16 matrix units, else fp16 with loss scaling on one with fp16
    matrix units, else fp32. On a CPU and on MPS it takes fp32: there the exact numbers are worth
    more than the speed, and bf16 or fp16 can be asked for by name.

    Raises:
        RequestError: the hardware cannot do what is requested.
    """
    if requested not in get_args(RequestedPrecision):
        raise RequestError(
            f"unknown precision '{requested}'",
            where="precision.dtype",
            rule=f"one of {', '.join(get_args(RequestedPrecision))}",
            remedy="fp8 and 4-bit formats are listed by `surefoot show formats` and not trained in",
        )
    if requested == "auto":
        name, reason = _best(hardware)
        return _precision(name, hardware, f"auto: {reason}")
    _refuse_unsupported(requested, hardware)
    return _precision(requested, hardware, f"asked for by name{_caution(requested, hardware)}")


def _prove_autocast(precision: Precision, device: torch.device) -> None:
    # Where a dtype is not supported, autocast turns itself off; a product tells the truth.
    with precision.autocast():
        one = torch.ones(1, 1, device=device)
        dtype = (one @ one).dtype
    if dtype != precision.compute_dtype:
        raise RequestError(
            f"autocast to {precision.name} computes in {dtype} on {device}",
            where="precision.dtype",
            rule="a precision that would silently do nothing is refused",
            remedy="use precision.dtype=auto",
        )


def _best(hardware: Hardware) -> tuple[PrecisionName, str]:
    name = hardware.name
    if hardware.device_type == "cuda":
        if hardware.fast_bf16:
            return "bf16", f"{name} has bf16 matrix units; bf16 has the range of fp32"
        if hardware.fast_fp16:
            return "fp16", f"{name} has fp16 matrix units and none for bf16; the loss is scaled"
        return "fp32", f"{name} has no matrix units for bf16 or fp16"
    if hardware.device_type == "cpu":
        more = "; it has bf16 matrix units, dtype=bf16 uses them" if hardware.fast_bf16 else ""
        return "fp32", f"the exact reference on a CPU{more}"
    suited = SUITED_TO[hardware.device_type]
    return "fp32", f"the exact reference on {hardware.device_type}; dtype={suited} is faster there"


def _refuse_unsupported(requested: PrecisionName, hardware: Hardware) -> None:
    where = f"{hardware.device_type} ({hardware.name})"
    supported = {
        "fp32": True,
        "tf32": hardware.tf32,
        "bf16": hardware.bf16,
        "fp16": hardware.fp16,
    }
    if supported[requested]:
        return
    why = {
        "tf32": "TF32 needs an NVIDIA GPU of compute capability 8.0 or newer",
        "bf16": "the device or its driver has no bf16",
        "fp16": "the device has no fp16 autocast",
    }[requested]
    raise RequestError(
        f"precision {requested} cannot work on {where}: {why}",
        where="precision.dtype",
        rule="a precision that would silently do nothing is refused",
        remedy="use precision.dtype=auto, or "
        + " or ".join(name for name, can in supported.items() if can),
    )


def _caution(requested: PrecisionName, hardware: Hardware) -> str:
    slow_bf16 = requested == "bf16" and not hardware.fast_bf16
    slow_fp16 = requested == "fp16" and not hardware.fast_fp16
    if slow_bf16 or slow_fp16:
        return f"; {hardware.name} has no matrix units for it, so expect no gain in speed"
    if requested == "fp16" and hardware.fast_bf16:
        return "; bf16 works here as fast and needs no loss scaling"
    return ""


def _precision(name: PrecisionName, hardware: Hardware, reason: str) -> Precision:
    return Precision(name, _COMPUTE_DTYPES[name], hardware.device_type, name == "fp16", reason)


@dataclass(frozen=True, slots=True)
class MatmulMode:
    """How float32 products are computed, read back from torch."""

    matmul: str
    """`highest` (float32), `high` (TF32) or `medium`."""
    cudnn_tf32: bool
    """Whether cuDNN convolutions use TF32; a switch of its own."""

    def __str__(self) -> str:
        matmul = {"highest": "float32", "high": "TF32"}.get(self.matmul, self.matmul)
        convolution = "TF32" if self.cudnn_tf32 else "float32"
        return f"float32 matmul in {matmul}, cuDNN convolution in {convolution}"


def apply_matmul_mode(precision: Precision) -> MatmulMode:
    """Sets how float32 matrix products and convolutions are computed in this process.

    TF32 for `tf32`, real float32 for every other precision: torch itself would leave cuDNN's
    convolutions in TF32. Call it before the first forward.

    Returns:
        The settings in force, read back.
    """
    use_tf32 = precision.name == "tf32"
    torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = use_tf32
    return matmul_mode()


def matmul_mode() -> MatmulMode:
    """The settings in force.

    Where a program has used torch's per-backend switches (`fp32_precision`), torch refuses to
    answer in the older words; those switches are then read themselves.
    """
    try:
        return MatmulMode(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        matmul = torch.backends.cuda.matmul.fp32_precision
        convolution = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        return MatmulMode("high" if matmul == "tf32" else "highest", convolution == "tf32")
