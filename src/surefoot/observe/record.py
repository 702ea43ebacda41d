"""The record of a run: what another engineer needs to trust it or to repeat it.

Reads the machine, the code and torch's switches once, at the start. Records only environment
variables from an explicit list, so that no secret is written to disk.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from surefoot.observe.files.atomic import atomic_write
from surefoot.observe.machine import container_hint, describe_machine
from surefoot.observe.metrics_log import strict
from surefoot.observe.repository import MAX_DIFF_BYTES, repository_state
from surefoot.observe.run_folder import RunFolder

FORMAT = 1

RECORDED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GOMP_SPINCOUNT",
    "HF_HUB_OFFLINE",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MALLOC_CONF",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "TOKENIZERS_PARALLELISM",
    "TORCH_COMPILE_DISABLE",
    "TORCH_LOGS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCHINDUCTOR_CACHE_DIR",
    "WORLD_SIZE",
)

_SECRET = r"(?:token|secret|passw|credential|api[-_.]?key|access[-_.]?key|auth)"
_SECRET_NAME = re.compile(rf"^-{{0,2}}[\w.-]*{_SECRET}[\w.-]*$", re.IGNORECASE)
_SECRET_PAIR = re.compile(rf"^(-{{0,2}}[\w.-]*{_SECRET}[\w.-]*[=:]).+$", re.IGNORECASE)
_URL_USER = re.compile(r"(\w+://)[^/@\s]+@")
HIDDEN = "[hidden]"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """JSON-compatible fields, and the uncommitted changes as a separate file."""

    fields: Mapping[str, object]
    diff: bytes


def collect_record(
    *,
    name: str,
    seed: int,
    data: Mapping[str, object],
    extra: Mapping[str, object] | None = None,
    command_line: Sequence[str] | None = None,
    folder: Path | None = None,
) -> RunRecord:
    """Reads the current state of code, packages, machine and torch's switches.

    Args:
        data: name of each data set → its fingerprint and other facts.
        extra: further facts of the run (device, precision and its reason, parameter count,
            `deciding_metric`); plain values.
        command_line: default: that of this process.
        folder: whose repository is recorded; default: the working directory.
    """
    code = repository_state(folder or Path.cwd())
    fields: dict[str, object] = {
        "format": FORMAT,
        "name": name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": hide_secrets(sys.orig_argv if command_line is None else command_line),
        "working_directory": str(Path.cwd()),
        "seed": seed,
        "data": dict(data),
        "git": {
            "commit": code.commit,
            "branch": code.branch,
            "dirty": code.dirty,
            "diff_file": None,
            "diff_bytes": code.diff_bytes,
            "diff_sha256": code.diff_sha256,
            "diff_cut": code.diff_bytes > MAX_DIFF_BYTES,
            "untracked": list(code.untracked),
            "untracked_count": code.untracked_count,
            "reason": code.reason,
        },
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "system": {"platform": platform.platform(), "host": socket.gethostname()},
        "container": container_hint(),
        "hardware": describe_machine(),
        "torch": torch_state(),
        "environment": {k: os.environ[k] for k in RECORDED_VARIABLES if k in os.environ},
        "packages": package_versions(),
        "extra": dict(extra or {}),
    }
    clean = strict(fields)
    assert isinstance(clean, dict)
    return RunRecord(clean, code.diff)


def write_record(folder: RunFolder, record: RunRecord) -> Path:
    """Writes `record.json` and, if there is one, `artifacts/uncommitted.diff`; returns the
    record's path.

    A resumed run keeps its first record; later ones are `record.resume-N.json`.
    """
    stem, count = "", 0
    while folder.path.joinpath(f"record{stem}.json").exists():
        count += 1
        stem = f".resume-{count}"
    fields = dict(record.fields)
    if record.diff:
        diff_path = folder.artifacts_path / f"uncommitted{stem}.diff"
        atomic_write(diff_path, record.diff)
        git = fields["git"]
        assert isinstance(git, Mapping)
        fields["git"] = {**git, "diff_file": str(diff_path.relative_to(folder.path))}
    return folder.write_record(fields, name=f"record{stem}.json")


def hide_secrets(command_line: Sequence[str]) -> list[str]:
    """The command line with the values of options that name a secret replaced.

    >>> hide_secrets(["train", "--hub-token", "abc", "--set", "api_key=x", "https://me:pw@host/a"])
    ['train', '--hub-token', '[hidden]', '--set', 'api_key=[hidden]', 'https://[hidden]@host/a']
    """
    shown: list[str] = []
    hide_next = False
    for word in command_line:
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)
            hide_next = False
            continue
        hide_next = word.startswith("-") and bool(_SECRET_NAME.match(word))
        word = _SECRET_PAIR.sub(rf"\1{HIDDEN}", word)
        shown.append(_URL_USER.sub(rf"\1{HIDDEN}@", word))
    return shown


def package_versions() -> dict[str, str]:
    """Every installed distribution and its version, by name."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found[name.lower()] = distribution.version
    return dict(sorted(found.items()))


def torch_state() -> dict[str, object]:
    """Torch's build and the switches that change numbers or speed."""
    backends = torch.backends
    cudnn_conv = getattr(backends.cudnn, "conv", None)
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "cuda_available": torch.cuda.is_available(),
        "mps_available": backends.mps.is_available(),
        "cudnn": backends.cudnn.version() if backends.cudnn.is_available() else None,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": backends.cudnn.deterministic,
        "cudnn_benchmark": backends.cudnn.benchmark,
        "cuda_matmul_fp32_precision": backends.cuda.matmul.fp32_precision,
        "cudnn_conv_fp32_precision": getattr(cudnn_conv, "fp32_precision", None),
        "cpu_capability": backends.cpu.get_cpu_capability(),
        "mkldnn": backends.mkldnn.is_available(),
        "sdp_flash": backends.cuda.flash_sdp_enabled(),
        "sdp_memory_efficient": backends.cuda.mem_efficient_sdp_enabled(),
        "sdp_math": backends.cuda.math_sdp_enabled(),
        "sdp_cudnn": backends.cuda.cudnn_sdp_enabled(),
    }
