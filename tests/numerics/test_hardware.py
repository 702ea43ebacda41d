"""The probe: facts of this machine, and of GPUs by what torch would say of them."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from surefoot.core.errors import RequestError
from surefoot.numerics.hardware import Hardware, available_device_types, probe_hardware


def pretend_cuda(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, hip: str | None = None
) -> None:
    properties = SimpleNamespace(name="a GPU", major=major, minor=minor, total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.setattr(torch.version, "hip", hip)


def test_this_cpu() -> None:
    facts = probe_hardware("cpu")
    assert facts.device_type == "cpu" and facts.name
    assert facts.bf16 and facts.fp16
    assert not (facts.tf32 or facts.fp8) and facts.memory_bytes == 0


def test_a_torch_that_does_not_tell_the_units_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert probe_hardware("cpu").fast_bf16
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.delattr(torch.cpu, name)
    assert not probe_hardware("cpu").fast_bf16


@pytest.mark.parametrize(
    ("capability", "fast_fp16", "fast_bf16", "tf32", "fp8"),
    [
        ((6, 1), False, False, False, False),
        ((7, 0), True, False, False, False),
        ((7, 5), True, False, False, False),
        ((8, 0), True, True, True, False),
        ((8, 6), True, True, True, False),
        ((8, 9), True, True, True, True),
        ((9, 0), True, True, True, True),
        ((10, 0), True, True, True, True),
    ],
)
def test_matrix_units_by_compute_capability(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    fast_fp16: bool,
    fast_bf16: bool,
    tf32: bool,
    fp8: bool,
) -> None:
    pretend_cuda(monkeypatch, *capability)
    facts = probe_hardware("cuda")
    assert (facts.fast_fp16, facts.fast_bf16, facts.tf32, facts.fp8) == (
        fast_fp16, fast_bf16, tf32, fp8
    )  # fmt: skip
    assert facts.compute_capability == capability and facts.memory_bytes == 2**30
    assert facts.bf16 and facts.fp16


def test_rocm_is_not_measured_by_nvidias_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 9, 4, hip="6.4")
    facts = probe_hardware("cuda")
    assert facts.is_rocm and facts.compute_capability is None
    assert facts.fp16 and facts.fast_fp16 and not facts.tf32
    # An emulated bf16 is no reason to choose it.
    assert not facts.bf16 and not facts.fast_bf16


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_an_absent_device_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RequestError, match=f"no device of type '{device}'") as caught:
        probe_hardware(device)
    assert caught.value.remedy.endswith("one of: cpu")


def test_an_unknown_device_type_is_refused() -> None:
    with pytest.raises(RequestError, match="'meta' is not supported"):
        probe_hardware("meta")


def test_the_fastest_device_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert available_device_types() == ["cpu"]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert available_device_types() == ["mps", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert available_device_types() == ["cuda", "mps", "cpu"]


def test_nothing_is_claimed_that_was_not_asked() -> None:
    facts = asdict(Hardware("cuda", "an unknown device"))
    assert not any(facts[name] for name in facts if name not in ("device_type", "name"))


@pytest.mark.parametrize(("amx", "avx"), [(True, False), (False, True), (False, False)])
def test_either_kind_of_unit_makes_bf16_fast_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    assert probe_hardware("cpu").fast_bf16 == (amx or avx)


@pytest.mark.parametrize("version", [(13, 3), (14, 0), (15, 1)])
def test_bf16_on_apple_needs_macos_14(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *wanted: version >= wanted)
    facts = probe_hardware("mps")
    assert facts.device_type == "mps" and facts.fp16 and facts.fast_fp16
    assert facts.bf16 == (version >= (14, 0)) and not facts.fast_bf16
