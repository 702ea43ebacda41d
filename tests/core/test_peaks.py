"""Peaks are known or None, and no share of one is above 1."""

from __future__ import annotations

import doctest

import pytest

from surefoot.core import peaks
from surefoot.core.errors import SurefootError
from surefoot.core.peaks import PEAKS, dense_peak, model_flops_utilization


@pytest.mark.parametrize(
    ("name", "number_type", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA L40S", "fp32", 91.6),
        ("NVIDIA L4", "fp32", 30.3),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H1000", "bf16", None),
        ("cpu", "bf16", None),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(
    name: str, number_type: str, tera: float | None
) -> None:
    found = dense_peak(name, number_type)
    assert found == (None if tera is None else pytest.approx(tera * 1e12))


def test_each_peak_says_where_it_stands() -> None:
    assert all(source for _, _, source in PEAKS)
    assert doctest.testmod(peaks).failed == 0


def test_more_than_the_peak_is_an_error() -> None:
    assert model_flops_utilization(5.0, 5.0) == 1.0
    with pytest.raises(SurefootError, match="of 104% is impossible"):
        model_flops_utilization(1.04, 1.0)
