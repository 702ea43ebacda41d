"""Seeds, the determinism switch, and the random state as plain values.

It never touches a generator that somebody else owns (a loader's, a sampler's), and keeps nothing
that needs pickle.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from surefoot.core.errors import CheckpointError, RequestError

CUBLAS_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS reads this once, when it first makes a handle."""
DETERMINISTIC_WORKSPACES: Final = (":4096:8", ":16:8")
CURRENT: Final = "current"
LARGEST_SEED: Final = 2**32 - 1
"""NumPy's global generator takes 32 bits."""


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's global generators (CPU and every accelerator).

    A seed alone does not make a run repeat: see `use_deterministic` for the algorithms, and the
    loader, which keys its randomness by sample.

    Raises:
        RequestError: the seed is outside 0 .. 2**32 - 1.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise RequestError(
            f"seed is {seed}",
            where="seed",
            rule=f"a seed is within 0 .. {LARGEST_SEED}",
            remedy="take a smaller number; 0 is as good as any",
        )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(frozen=True, slots=True)
class DeterminismSettings:
    """What is in force, read back from torch."""

    deterministic_algorithms: bool
    warn_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    cublas_workspace: str
    """Value of `CUBLAS_WORKSPACE_CONFIG`; empty where it is not set."""
    notes: tuple[str, ...] = ()
    """What the switch cannot promise here."""


def determinism_settings() -> DeterminismSettings:
    """Reads the settings in force."""
    return DeterminismSettings(
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        cublas_workspace=os.environ.get(CUBLAS_WORKSPACE, ""),
    )


def use_deterministic(enabled: bool) -> DeterminismSettings:
    """Turns deterministic algorithms on or off for the process, and reports what is in force.

    On: torch raises where it has no deterministic kernel, cuDNN picks deterministic kernels and
    does not benchmark, and cuBLAS gets a fixed workspace unless the environment names one.
    Off: torch may pick the fastest kernels; cuDNN does not benchmark unless told elsewhere. The
    cuBLAS variable is left alone, as cuBLAS has read it.

    Returns:
        The settings in force, with notes on what came too late.
    """
    notes: list[str] = []
    if enabled:
        notes = _fix_cublas_workspace()
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.deterministic = enabled
    torch.backends.cudnn.benchmark = False
    settings = determinism_settings()
    return DeterminismSettings(
        settings.deterministic_algorithms,
        settings.warn_only,
        settings.cudnn_deterministic,
        settings.cudnn_benchmark,
        settings.cublas_workspace,
        tuple(notes),
    )


def _fix_cublas_workspace() -> list[str]:
    present = os.environ.get(CUBLAS_WORKSPACE)
    if present is None:
        os.environ[CUBLAS_WORKSPACE] = DETERMINISTIC_WORKSPACES[0]
        if torch.cuda.is_initialized():
            return [
                f"{CUBLAS_WORKSPACE} was set after CUDA had started: cuBLAS may not have read it; "
                f"set {CUBLAS_WORKSPACE}={DETERMINISTIC_WORKSPACES[0]} before the process starts"
            ]
    elif present not in DETERMINISTIC_WORKSPACES:
        return [
            f"{CUBLAS_WORKSPACE}={present} was set before; deterministic values are "
            + " and ".join(DETERMINISTIC_WORKSPACES)
        ]
    return []


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[DeterminismSettings]:
    """`use_deterministic` for a block; the settings from before come back, exception or not."""
    before = determinism_settings()
    try:
        yield use_deterministic(enabled)
    finally:
        torch.use_deterministic_algorithms(
            before.deterministic_algorithms, warn_only=before.warn_only
        )
        torch.backends.cudnn.deterministic = before.cudnn_deterministic
        torch.backends.cudnn.benchmark = before.cudnn_benchmark
        if before.cublas_workspace:
            os.environ[CUBLAS_WORKSPACE] = before.cublas_workspace
        else:
            os.environ.pop(CUBLAS_WORKSPACE, None)


def capture_rng(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state of every global generator that a step on `device` may draw from.

    Returns:
        Python's and NumPy's state as numbers, strings and lists; torch's as uint8 CPU tensors:
        `torch_cpu` and, for a CUDA or MPS device, `torch_device` with `device_type`.
    """
    device = torch.device(device)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": list(words), "gauss_next": gauss},
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch_cpu": torch.get_rng_state(),
        "device_type": device.type,
    }
    if device.type == "cuda":
        state["torch_device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["torch_device"] = torch.mps.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device | str = CURRENT) -> None:
    """Puts back what `capture_rng` returned.

    Args:
        state: the captured state.
        device: accelerator that takes the device state; `current` is the current one of that type.

    Raises:
        CheckpointError: the state was captured on an accelerator that this machine lacks.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss_next"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_bytes(state["torch_cpu"]))
    kind = state["device_type"]
    if kind == "cuda":
        _require(torch.cuda.is_available(), kind)
        torch.cuda.set_rng_state(
            _bytes(state["torch_device"]), torch.device("cuda" if device == CURRENT else device)
        )
    elif kind == "mps":
        _require(torch.backends.mps.is_available(), kind)
        torch.mps.set_rng_state(_bytes(state["torch_device"]))


@contextmanager
def preserved_rng(device: torch.device | str = "cpu") -> Iterator[None]:
    """What runs inside may draw random numbers; outside nobody can tell, exception or not."""
    state = capture_rng(device)
    try:
        yield
    finally:
        restore_rng(state, device)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _bytes(state: torch.Tensor) -> torch.Tensor:
    return state.to(device="cpu", dtype=torch.uint8)


def _require(available: bool, kind: str) -> None:
    if not available:
        raise CheckpointError(
            f"the random state was captured on {kind}, which this machine does not have",
            where="rng",
            rule="a resume is exact on the same type of device only",
            remedy="resume on such a machine, or start a new run from the weights",
        )
