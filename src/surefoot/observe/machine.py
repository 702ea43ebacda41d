"""Describes this machine and what its processors support, without torch.

A missing driver, container limit or /proc is a recorded fact, never an error. Measures no speed.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pynvml

_CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "neon",
    "asimd",
    "bf16",
    "sve",
)


def describe_machine() -> dict[str, object]:
    """The machine as plain JSON values: `cpu`, `memory`, `gpus`, `driver`, `features`."""
    cpu = describe_cpu()
    gpus, driver = describe_gpus()
    return {
        "cpu": cpu,
        "memory": describe_memory(),
        "gpus": gpus,
        "driver": driver,
        "features": features(cpu, gpus),
    }


def describe_cpu() -> dict[str, object]:
    """Name, cores, and the vector and matrix instructions that matter for training."""
    info = _read("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in info.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(logical=True),
        "usable_cores": usable,
        "quota_cores": _quota_cores(),
        "instructions": [flag for flag in _CPU_FLAGS if flag in flags],
    }


def describe_memory() -> dict[str, object]:
    """Bytes of main memory, and the container's limit if there is one."""
    total = int(psutil.virtual_memory().total)
    limit = None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit() and int(text) < total:
            limit = int(text)
    return {"total_bytes": total, "limit_bytes": limit}


def describe_gpus() -> tuple[list[dict[str, object]], dict[str, object]]:
    """NVIDIA GPUs as the driver reports them, and the driver; or why there are none.

    Lists all GPUs of the machine, including those hidden by `CUDA_VISIBLE_DEVICES`.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], {"version": None, "cuda": None, "reason": str(error)}
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())
        driver: dict[str, object] = {
            "version": _text(pynvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "reason": None,
        }
        return [_describe_gpu(i) for i in range(pynvml.nvmlDeviceGetCount())], driver
    except pynvml.NVMLError as error:
        return [], {"version": None, "cuda": None, "reason": str(error)}
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _describe_gpu(index: int) -> dict[str, object]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: str) -> Any:
        # A virtual or older GPU may not support every query; recorded as null.
        try:
            return getattr(pynvml, question)(handle)
        except pynvml.NVMLError:
            return None

    capability = ask("nvmlDeviceGetCudaComputeCapability")
    memory = ask("nvmlDeviceGetMemoryInfo")
    power = ask("nvmlDeviceGetEnforcedPowerLimit")
    name = ask("nvmlDeviceGetName")
    return {
        "index": index,
        "name": None if name is None else _text(name),
        "memory_bytes": None if memory is None else int(memory.total),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "power_limit_watts": None if power is None else power / 1000,
    }


def features(cpu: Mapping[str, Any], gpus: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    """What the machine supports: feature → `supported` and the reason."""
    capability = max((_capability(gpu) for gpu in gpus), default=(0, 0))
    has_gpu = capability > (0, 0)
    sm = f"compute capability {capability[0]}.{capability[1]}" if has_gpu else "no NVIDIA GPU"
    flags = set(cpu["instructions"])
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    amd = Path("/dev/kfd").exists()
    tpu = Path("/dev/accel0").exists() or "TPU_NAME" in os.environ
    amx = sorted(flag for flag in flags if flag.startswith("amx_"))
    vectors = sorted(flags & {"avx2", "avx512f", "asimd", "sve"})
    bf16_flags = sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"})

    def fact(supported: bool, reason: str) -> dict[str, object]:
        return {"supported": supported, "reason": reason}

    return {
        "cuda": fact(has_gpu, sm),
        "tf32": fact(capability >= (8, 0), f"{sm}; needs 8.0"),
        "bf16 on gpu": fact(capability >= (8, 0), f"{sm}; needs 8.0"),
        "fp16 on gpu": fact(capability >= (7, 0), f"{sm}; matrix units need 7.0"),
        "fp8 on gpu": fact(capability >= (8, 9), f"{sm}; needs 8.9"),
        "fp4 on gpu": fact(capability >= (10, 0), f"{sm}; needs 10.0"),
        "bf16 on cpu": fact(bool(bf16_flags), _list(bf16_flags) or "emulated: no bf16 instruction"),
        "amx": fact(bool(amx), _list(amx) or "no AMX instruction"),
        "vector units": fact(bool(vectors), _list(vectors) or "none known"),
        "mps": fact(apple, "Apple silicon" if apple else "not an Apple machine"),
        "rocm": fact(amd, "/dev/kfd is there" if amd else "no AMD GPU driver"),
        "tpu": fact(False, "a TPU is there; torch/XLA is not supported" if tpu else "no TPU"),
    }


def container_hint() -> dict[str, object]:
    """Which kind of container this process seems to run in, and the evidence.

    Only a hint: a container can hide itself.
    """
    environment = os.environ
    groups = _read("/proc/1/cgroup") + _read("/proc/self/cgroup")
    signs = (
        ("kubernetes", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_HOST" in environment),
        ("apptainer", "APPTAINER_CONTAINER", "APPTAINER_CONTAINER" in environment),
        ("singularity", "SINGULARITY_CONTAINER", "SINGULARITY_CONTAINER" in environment),
        ("docker", "/.dockerenv", Path("/.dockerenv").exists()),
        ("podman", "/run/.containerenv", Path("/run/.containerenv").exists()),
        ("kubernetes", "cgroup", "kubepods" in groups),
        ("docker", "cgroup", "docker" in groups),
        ("containerd", "cgroup", "containerd" in groups),
        ("lxc", "cgroup", "/lxc/" in groups),
    )
    for kind, sign, present in signs:
        if present:
            return {"kind": kind, "sign": sign}
    return {"kind": "none", "sign": "no sign of a container"}


def _capability(gpu: Mapping[str, object]) -> tuple[int, int]:
    text = gpu["compute_capability"]
    if not isinstance(text, str):
        return (0, 0)
    major, minor = text.split(".")
    return int(major), int(minor)


def _quota_cores() -> float | None:
    """Cores that a container's quota allows, None without a quota (cgroup v2)."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _list(names: list[str]) -> str:
    return ", ".join(names)
