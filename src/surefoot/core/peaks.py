"""Dense peak FLOP/s of devices, and model FLOPs utilization.

A device or dtype that is not in the table has no peak: nothing is assumed. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from surefoot.core.errors import SurefootError

TERA: Final = 1e12

PEAKS: Final[tuple[tuple[str, Mapping[str, float], str], ...]] = (
    ("B200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}, "HGX B200 data sheet, 1/8"),
    ("H200", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.7, "fp32": 67}, "H200 SXM data sheet"),
    ("H100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}, "H100 PCIe data sheet"),
    ("H100 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}, "H100 NVL data sheet"),
    ("H100", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.7, "fp32": 67}, "H100 SXM data sheet"),
    ("A100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}, "A100 data sheet"),
    ("L40S", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}, "L40S data sheet"),
    ("L4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}, "L4 data sheet"),
    ("A10G", {}, "no peak of this variant is published"),
    ("A10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}, "A10 data sheet"),
    ("V100", {"fp16": 125, "fp32": 15.7}, "V100 SXM2 data sheet"),
    ("T4", {"fp16": 65, "fp32": 8.1}, "T4 data sheet"),
)
"""Words of a device's name, TFLOP/s by dtype without sparsity, NVIDIA's source.

The first entry whose words are all in the name is used."""


def dense_peak(device_name: str, number_type: str) -> float | None:
    """FLOP/s of one device, or None if no peak is known.

    Args:
        device_name: as the driver reports it.
        number_type: `bf16`, `fp16`, `tf32` or `fp32`.

    >>> dense_peak("NVIDIA H100 80GB HBM3", "bf16") / TERA
    989.5
    >>> dense_peak("NVIDIA H100 PCIe", "bf16") / TERA
    756.0
    >>> dense_peak("Some other card", "bf16") is None
    True
    """
    words = device_name.replace("-", " ").split()
    for known, peaks, _ in PEAKS:
        if all(word in words for word in known.split()):
            peak = peaks.get(number_type)
            return None if peak is None else peak * TERA
    return None


def model_flops_utilization(flops_per_second: float, peak: float) -> float:
    """Share of the peak that the model's own operations use (MFU; PaLM, arXiv:2204.02311, B).

    >>> model_flops_utilization(4e14, 8e14)
    0.5

    Raises:
        SurefootError: it is above 1.
    """
    share = flops_per_second / peak
    if share > 1.0:
        raise SurefootError(
            f"a model FLOPs utilization of {share:.0%} is impossible",
            where=f"{flops_per_second:.4g} FLOP/s, with a peak of {peak:.4g}",
            rule="no device computes faster than its peak",
            remedy="the model's operations, the peak or the clock is wrong; nothing is recorded",
        )
    return share
