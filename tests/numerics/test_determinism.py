"""Seeds, the switch and random state: everything comes back, and nothing needs pickle."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from surefoot.core.errors import CheckpointError, RequestError
from surefoot.numerics.determinism import (
    CUBLAS_WORKSPACE,
    capture_rng,
    determinism_settings,
    deterministic,
    preserved_rng,
    restore_rng,
    seed_everything,
    use_deterministic,
)


def draws() -> tuple[object, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    )


@pytest.fixture(autouse=True)
def leave_no_trace(monkeypatch: pytest.MonkeyPatch):
    before = determinism_settings()
    with preserved_rng():
        yield
    torch.use_deterministic_algorithms(before.deterministic_algorithms, warn_only=before.warn_only)
    torch.backends.cudnn.deterministic = before.cudnn_deterministic
    torch.backends.cudnn.benchmark = before.cudnn_benchmark
    os.environ.pop(CUBLAS_WORKSPACE, None)
    if before.cublas_workspace:
        os.environ[CUBLAS_WORKSPACE] = before.cublas_workspace


def test_one_seed_repeats_every_generator() -> None:
    seed_everything(5)
    first = draws()
    seed_everything(5)
    assert draws() == first
    seed_everything(6)
    other = draws()
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(RequestError, match="seed"):
        seed_everything(seed)
    seed_everything(2**32 - 1)


def test_capture_and_restore_continue_every_stream() -> None:
    seed_everything(1)
    draws()  # leaves a Gaussian half used in Python's and NumPy's generators
    state = capture_rng()
    first = draws()
    draws()
    restore_rng(state)
    assert draws() == first


def test_a_captured_state_does_not_move_on() -> None:
    seed_everything(1)
    state = capture_rng()
    first = draws()
    for _ in range(2):
        restore_rng(state)
        assert draws() == first


def test_the_state_is_json_and_tensors() -> None:
    seed_everything(1)
    draws()
    state = capture_rng("cpu")
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert set(tensors) == {"torch_cpu"} and tensors["torch_cpu"].dtype == torch.uint8
    plain = json.loads(json.dumps({k: v for k, v in state.items() if k not in tensors}))
    first = draws()
    restore_rng({**plain, **tensors})
    assert draws() == first


def test_preserved_rng_hides_what_is_drawn_inside() -> None:
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    with preserved_rng():
        draws()
    assert draws() == expected
    seed_everything(1)
    with pytest.raises(KeyError), preserved_rng():
        draws()
        raise KeyError
    assert draws() == expected


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_state_of_an_absent_device_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    state = {**capture_rng(), "device_type": kind, "torch_device": torch.zeros(16)}
    with pytest.raises(CheckpointError, match=kind):
        restore_rng(state)


def test_the_switch_sets_and_reports_everything() -> None:
    os.environ.pop(CUBLAS_WORKSPACE, None)
    torch.backends.cudnn.benchmark = True
    settings = use_deterministic(True)
    assert settings.deterministic_algorithms and not settings.warn_only
    assert settings.cudnn_deterministic and not settings.cudnn_benchmark
    assert settings.cublas_workspace == ":4096:8" == os.environ[CUBLAS_WORKSPACE]
    assert settings.notes == ()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    off = use_deterministic(False)
    assert not off.deterministic_algorithms and not off.cudnn_deterministic
    assert not off.cudnn_benchmark


def test_off_leaves_the_workspace_unset() -> None:
    os.environ.pop(CUBLAS_WORKSPACE, None)
    assert use_deterministic(False).cublas_workspace == ""
    assert CUBLAS_WORKSPACE not in os.environ


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_state_of_an_accelerator_is_kept_too(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the accelerator's generator; the real one is tested on a GPU."""
    room, asked = getattr(torch, kind), []
    kept = torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    monkeypatch.setattr(room, "get_rng_state", lambda *device: asked.append(device) or kept)
    monkeypatch.setattr(room, "set_rng_state", lambda state, *device: asked.append((state, device)))
    state = capture_rng(f"{kind}:0")
    assert state["device_type"] == kind and torch.equal(state["torch_device"], kept)
    restore_rng(state)
    restore_rng(state, f"{kind}:0")
    if kind == "cuda":
        assert asked[0] == (torch.device("cuda:0"),)
        assert [entry[1] for entry in asked[1:]] == [
            (torch.device("cuda"),),
            (torch.device("cuda:0"),),
        ]
    assert all(torch.equal(entry[0], kept) for entry in asked[1:]) and len(asked) == 3


def test_a_workspace_set_at_launch_is_kept_and_judged() -> None:
    os.environ[CUBLAS_WORKSPACE] = ":16:8"
    assert use_deterministic(True).notes == ()
    assert os.environ[CUBLAS_WORKSPACE] == ":16:8"
    os.environ[CUBLAS_WORKSPACE] = ":0:0"
    (note,) = use_deterministic(True).notes
    assert ":0:0" in note and os.environ[CUBLAS_WORKSPACE] == ":0:0"


def test_a_workspace_that_comes_too_late_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.pop(CUBLAS_WORKSPACE, None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    (note,) = use_deterministic(True).notes
    assert "before the process starts" in note


def test_the_context_puts_the_settings_back() -> None:
    os.environ.pop(CUBLAS_WORKSPACE, None)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    before = determinism_settings()
    with pytest.raises(KeyError), deterministic() as settings:
        assert settings.deterministic_algorithms and not settings.warn_only
        raise KeyError
    assert determinism_settings() == before
    assert CUBLAS_WORKSPACE not in os.environ
    os.environ[CUBLAS_WORKSPACE] = ":16:8"
    with deterministic():
        os.environ[CUBLAS_WORKSPACE] = ":0:0"
    assert os.environ.pop(CUBLAS_WORKSPACE) == ":16:8"
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert determinism_settings() == before


def test_an_operation_without_a_deterministic_kernel_raises() -> None:
    with deterministic(), pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))


REPEAT = """
import torch
from surefoot.numerics.determinism import seed_everything, use_deterministic
seed_everything(3)
use_deterministic(True)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


def test_two_processes_give_the_same_losses() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", REPEAT],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1] and len(runs[0].split()) == 5
