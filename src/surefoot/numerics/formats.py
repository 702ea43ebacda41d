"""The table of number formats that deep learning computes in, read from torch where torch has them.

Facts only. Whether this machine computes in a format is `hardware.py`'s to say, and whether a run
may train in it `precision.py`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

OCP_FP8: Final = "OCP 8-bit Floating Point Specification, 2023"
OCP_MX: Final = "OCP Microscaling Formats Specification, 2023"
MX_BLOCK: Final = 32
"""Elements that share one scale in the MX formats."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One number format. A value is `sign * 2**exponent * (1 + fraction)` where it is a float."""

    name: str
    bits: float
    """Of an element; an MX element carries its share of the scale, 8 bits for each block."""
    exponent_bits: int
    mantissa_bits: int
    """Stored ones, the leading 1 not counted; for an integer its value bits."""
    largest: float
    smallest_normal: float
    """Below it precision is lost bit by bit, until `smallest_subnormal`."""
    smallest_subnormal: float
    """Smallest positive value; what rounds below half of it is zero."""
    epsilon: float
    """Distance from 1 to the next larger value."""
    decimal_digits: float
    """`(mantissa_bits + 1) * log10(2)`; for an integer log10 of the largest."""
    trained_in: str
    """How a run uses it here, or that it does not."""
    source: str


def number_formats() -> list[NumberFormat]:
    """All formats, from wide to narrow."""
    return [
        _from_finfo("fp32", torch.float32, "weights, gradients, optimizer state, loss, norms"),
        _tf32(),
        _from_finfo("bf16", torch.bfloat16, "activations and their gradients, by autocast"),
        _from_finfo("fp16", torch.float16, "activations and their gradients, with loss scaling"),
        _from_finfo("fp8 e4m3", torch.float8_e4m3fn, _NOT_TRAINED, OCP_FP8),
        _from_finfo("fp8 e5m2", torch.float8_e5m2, _NOT_TRAINED, OCP_FP8),
        _int8(),
        *(_microscaled(*row) for row in _MX_ELEMENTS),
    ]


_NOT_TRAINED: Final = "not trained in"
# Name, exponent bits, mantissa bits, exponent bias, largest value.
_MX_ELEMENTS: Final = (
    ("mxfp8 e4m3", 4, 3, 7, 448.0),
    ("mxfp8 e5m2", 5, 2, 15, 57344.0),
    ("mxfp6 e2m3", 2, 3, 1, 7.5),
    ("mxfp6 e3m2", 3, 2, 3, 28.0),
    ("mxfp4 e2m1", 2, 1, 1, 6.0),
)


def _from_finfo(
    name: str, dtype: torch.dtype, trained_in: str, source: str = "torch.finfo"
) -> NumberFormat:
    info = torch.finfo(dtype)
    mantissa_bits = -round(math.log2(info.eps))
    return NumberFormat(
        name=name,
        bits=info.bits,
        exponent_bits=info.bits - 1 - mantissa_bits,
        mantissa_bits=mantissa_bits,
        largest=info.max,
        smallest_normal=info.smallest_normal,
        smallest_subnormal=info.smallest_normal * info.eps,
        epsilon=info.eps,
        decimal_digits=_digits(mantissa_bits),
        trained_in=trained_in,
        source=source if source == "torch.finfo" else f"torch.finfo; {source}",
    )


def _tf32() -> NumberFormat:
    # The exponent of fp32 and the mantissa of fp16: 19 bits inside the matrix unit, 32 in memory.
    wide = torch.finfo(torch.float32)
    epsilon = torch.finfo(torch.float16).eps
    return NumberFormat(
        name="tf32",
        bits=19,
        exponent_bits=8,
        mantissa_bits=10,
        largest=(2.0 - epsilon) * 2.0**127,
        smallest_normal=wide.smallest_normal,
        smallest_subnormal=wide.smallest_normal * epsilon,
        epsilon=epsilon,
        decimal_digits=_digits(10),
        trained_in="fp32 matrix products and convolutions on NVIDIA GPUs, by name",
        source="NVIDIA A100 architecture white paper, 2020",
    )


def _int8() -> NumberFormat:
    info = torch.iinfo(torch.int8)
    return NumberFormat(
        name="int8",
        bits=info.bits,
        exponent_bits=0,
        mantissa_bits=info.bits - 1,
        largest=float(info.max),
        smallest_normal=1.0,
        smallest_subnormal=1.0,
        epsilon=1.0,
        decimal_digits=math.log10(info.max),
        trained_in=_NOT_TRAINED,
        source="torch.iinfo",
    )


def _microscaled(
    name: str, exponent_bits: int, mantissa_bits: int, bias: int, largest: float
) -> NumberFormat:
    smallest_normal = 2.0 ** (1 - bias)
    epsilon = 2.0**-mantissa_bits
    return NumberFormat(
        name=name,
        bits=1 + exponent_bits + mantissa_bits + 8 / MX_BLOCK,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        largest=largest,
        smallest_normal=smallest_normal,
        smallest_subnormal=smallest_normal * epsilon,
        epsilon=epsilon,
        decimal_digits=_digits(mantissa_bits),
        trained_in=f"{_NOT_TRAINED}; one power-of-two scale for each {MX_BLOCK} elements",
        source=OCP_MX,
    )


def _digits(mantissa_bits: int) -> float:
    return (mantissa_bits + 1) * math.log10(2.0)
