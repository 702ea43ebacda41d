"""The table of formats: its numbers against torch, arithmetic and the published ones."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.numerics.formats import NumberFormat, number_formats

FORMATS = {entry.name: entry for entry in number_formats()}
TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize(
    ("name", "bits", "exponent", "mantissa"),
    [
        ("fp32", 32, 8, 23), ("tf32", 19, 8, 10), ("bf16", 16, 8, 7), ("fp16", 16, 5, 10),
        ("fp8 e4m3", 8, 4, 3), ("fp8 e5m2", 8, 5, 2), ("int8", 8, 0, 7),
        ("mxfp8 e4m3", 8.25, 4, 3), ("mxfp8 e5m2", 8.25, 5, 2), ("mxfp6 e2m3", 6.25, 2, 3),
        ("mxfp6 e3m2", 6.25, 3, 2), ("mxfp4 e2m1", 4.25, 2, 1),
    ],
)  # fmt: skip
def test_bits(name: str, bits: float, exponent: int, mantissa: int) -> None:
    entry = FORMATS[name]
    assert (entry.bits, entry.exponent_bits, entry.mantissa_bits) == (bits, exponent, mantissa)


def test_nothing_is_left_out_or_named_twice() -> None:
    assert len(FORMATS) == len(number_formats()) == 12


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("fp16", 65504.0), ("fp8 e4m3", 448.0), ("fp8 e5m2", 57344.0), ("int8", 127.0),
        ("mxfp6 e2m3", 7.5), ("mxfp6 e3m2", 28.0), ("mxfp4 e2m1", 6.0),
    ],
)  # fmt: skip
def test_published_maxima(name: str, largest: float) -> None:
    assert FORMATS[name].largest == largest


def rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=torch.float64).to(dtype).double().item()


@pytest.mark.parametrize("name", TORCH)
def test_the_numbers_are_what_torch_does(name: str) -> None:
    entry, dtype = FORMATS[name], TORCH[name]
    assert rounded(1.0 + entry.epsilon, dtype) == 1.0 + entry.epsilon
    assert rounded(1.0 + entry.epsilon / 4, dtype) == 1.0
    assert rounded(entry.largest, dtype) == entry.largest
    assert rounded(entry.smallest_normal, dtype) == entry.smallest_normal
    assert rounded(entry.smallest_subnormal, dtype) == entry.smallest_subnormal
    assert rounded(entry.smallest_subnormal / 4, dtype) == 0.0


def test_fp16_underflows_below_its_subnormals_and_not_below_its_normals() -> None:
    fp16 = FORMATS["fp16"]
    assert fp16.smallest_normal == pytest.approx(6.1e-5, rel=0.01)
    assert fp16.smallest_subnormal == pytest.approx(6e-8, rel=0.01)
    assert rounded(3e-5, torch.float16) > 0 and rounded(2.9e-8, torch.float16) == 0.0


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16() -> None:
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert tf32.smallest_normal == fp32.smallest_normal
    assert tf32.epsilon == fp16.epsilon
    assert math.log2(tf32.largest) == pytest.approx(128, abs=1e-3) and tf32.largest < fp32.largest


@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith("mx")])
def test_mx_elements_enumerate_to_their_table(name: str) -> None:
    """Every bit pattern of the element, decoded by the specification's formula."""
    entry = FORMATS[name]
    e, m = entry.exponent_bits, entry.mantissa_bits
    bias = 2 ** (e - 1) - 1
    magnitudes = set()
    for exponent in range(2**e):
        for mantissa in range(2**m):
            fraction = mantissa / 2**m
            if exponent == 0:
                magnitudes.add(2.0 ** (1 - bias) * fraction)
            else:
                magnitudes.add(2.0 ** (exponent - bias) * (1 + fraction))
    if name == "mxfp8 e4m3":
        magnitudes.discard(480.0)  # the one NaN pattern
    if name == "mxfp8 e5m2":
        magnitudes = {v for v in magnitudes if v < 2.0 ** (31 - 15)}  # infinity and NaNs
    assert max(magnitudes) == entry.largest
    assert min(v for v in magnitudes if v > 0) == entry.smallest_subnormal
    assert min(v for v in magnitudes if v >= entry.smallest_normal) == entry.smallest_normal
    assert min(v for v in magnitudes if v > 1.0) - 1.0 == entry.epsilon


def test_digits() -> None:
    digits = {name: round(entry.decimal_digits, 1) for name, entry in FORMATS.items()}
    assert (digits["fp32"], digits["bf16"], digits["fp16"]) == (7.2, 2.4, 3.3)
    assert digits["int8"] == 2.1


def test_what_is_not_trained_in_says_so() -> None:
    for name, entry in FORMATS.items():
        is_trained = name in ("fp32", "tf32", "bf16", "fp16")
        assert isinstance(entry, NumberFormat)
        assert entry.trained_in.startswith("not trained in") != is_trained


def test_rows_that_torch_does_not_know() -> None:
    tf32, int8 = FORMATS["tf32"], FORMATS["int8"]
    assert tf32.smallest_subnormal == tf32.smallest_normal * 2.0**-10
    assert tf32.decimal_digits == FORMATS["fp16"].decimal_digits
    assert (int8.smallest_normal, int8.smallest_subnormal, int8.epsilon) == (1.0, 1.0, 1.0)


def test_each_row_names_its_source() -> None:
    assert FORMATS["fp32"].source == "torch.finfo"
    assert FORMATS["fp8 e4m3"].source.startswith("torch.finfo; OCP")
    assert all(entry.source for entry in FORMATS.values())
