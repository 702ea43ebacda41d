"""What this machine can compute in, asked of the machine itself.

It reports; it chooses nothing. An unknown device is reported as such, never given the abilities of
another.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from surefoot.core.errors import RequestError

AMPERE: Final = (8, 0)
VOLTA: Final = (7, 0)
ADA: Final = (8, 9)
"""First CUDA compute capability with fp8 matrix units."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and what it computes in. Frozen facts, so that a choice can be tested anywhere."""

    device_type: str
    """`cpu`, `cuda` or `mps`."""
    name: str
    compute_capability: tuple[int, int] | None = None
    """Of a CUDA device from NVIDIA, else None."""
    is_rocm: bool = False
    bf16: bool = False
    """Autocast to bf16 works."""
    fast_bf16: bool = False
    """Has matrix units for bf16."""
    fp16: bool = False
    """Autocast to fp16 works."""
    fast_fp16: bool = False
    tf32: bool = False
    fp8: bool = False
    """Has matrix units for fp8 (E4M3, E5M2)."""
    memory_bytes: int = 0
    """Of the device; 0 where it shares the host's memory."""


def probe_hardware(device: torch.device | str) -> Hardware:
    """Asks the machine about `device`.

    Raises:
        RequestError: the device type is unknown, or this machine has no such device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu()
    if device.type == "cuda" and torch.cuda.is_available():
        return _cuda(device)
    if device.type == "mps" and torch.backends.mps.is_available():
        return _mps()
    raise RequestError(
        f"this machine has no device of type '{device.type}'"
        if device.type in ("cuda", "mps")
        else f"device type '{device.type}' is not supported",
        where="device",
        rule="the device is one of cpu, cuda, mps, and present",
        remedy=f"use device=auto, or one of: {', '.join(available_device_types())}",
    )


def available_device_types() -> list[str]:
    """Device types of this machine, the fastest first; `cpu` is always there."""
    types = []
    if torch.cuda.is_available():
        types.append("cuda")
    if torch.backends.mps.is_available():
        types.append("mps")
    return [*types, "cpu"]


def _cpu() -> Hardware:
    name = _cpu_model() or platform.processor() or platform.machine()
    # Private names of torch: where one is gone, the CPU counts as one without such units.
    tests = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    fast = any(getattr(torch.cpu, test, bool)() for test in tests)
    return Hardware(device_type="cpu", name=name, bf16=True, fast_bf16=fast, fp16=True)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "")


def _cuda(device: torch.device) -> Hardware:
    properties = torch.cuda.get_device_properties(device)
    is_rocm = torch.version.hip is not None
    if is_rocm:
        # Compute capabilities of ROCm devices do not compare with NVIDIA's.
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return Hardware(
            device_type="cuda",
            name=properties.name,
            is_rocm=True,
            bf16=bf16,
            fast_bf16=bf16,
            fp16=True,
            fast_fp16=True,
            memory_bytes=properties.total_memory,
        )
    capability = (properties.major, properties.minor)
    return Hardware(
        device_type="cuda",
        name=properties.name,
        compute_capability=capability,
        bf16=torch.cuda.is_bf16_supported(),
        fast_bf16=capability >= AMPERE,
        fp16=True,
        fast_fp16=capability >= VOLTA,
        tf32=capability >= AMPERE,
        fp8=capability >= ADA,
        memory_bytes=properties.total_memory,
    )


def _mps() -> Hardware:
    return Hardware(
        device_type="mps",
        name=f"Apple {platform.machine()}",
        bf16=torch.backends.mps.is_macos_or_newer(14, 0),
        fp16=True,
        fast_fp16=True,
    )
