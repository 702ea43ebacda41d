"""Precision: chosen once, with its reason; refused where it would silently do nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.core.errors import RequestError
from surefoot.numerics import precision as precision_module
from surefoot.numerics.hardware import Hardware
from surefoot.numerics.precision import (
    SUITED_TO,
    Precision,
    apply_matmul_mode,
    choose_precision,
    decide_precision,
    matmul_mode,
)

CPU = Hardware("cpu", "a CPU", bf16=True, fp16=True)
AMX = Hardware("cpu", "a CPU with AMX", bf16=True, fast_bf16=True, fp16=True)
HOPPER = Hardware(
    "cuda", "an H100", (9, 0), bf16=True, fast_bf16=True, fp16=True, fast_fp16=True, tf32=True
)
VOLTA = Hardware("cuda", "a V100", (7, 0), bf16=True, fp16=True, fast_fp16=True)
PASCAL = Hardware("cuda", "a P40", (6, 1), fp16=True)
APPLE = Hardware("mps", "an M2", bf16=True, fp16=True, fast_fp16=True)
ALL = [CPU, AMX, HOPPER, VOLTA, PASCAL, APPLE]


@pytest.fixture(autouse=True)
def leave_no_trace():
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.parametrize(
    ("hardware", "name", "because"),
    [
        (HOPPER, "bf16", "has bf16 matrix units"),
        (VOLTA, "fp16", "none for bf16"),
        (PASCAL, "fp32", "no matrix units"),
        (CPU, "fp32", "exact reference"),
        (AMX, "fp32", "dtype=bf16 uses them"),
        (APPLE, "fp32", "exact reference"),
    ],
    ids=lambda value: value.name if isinstance(value, Hardware) else None,
)
def test_auto_says_what_it_chose_and_why(hardware: Hardware, name: str, because: str) -> None:
    chosen = decide_precision("auto", hardware)
    assert chosen.name == name
    assert chosen.reason.startswith("auto: ") and because in chosen.reason
    assert chosen.device_type == hardware.device_type


@pytest.mark.parametrize("hardware", ALL, ids=lambda hardware: hardware.name)
def test_auto_is_always_something_that_works(hardware: Hardware) -> None:
    chosen = decide_precision("auto", hardware)
    assert decide_precision(chosen.name, hardware).name == chosen.name


@pytest.mark.parametrize("hardware", ALL, ids=lambda hardware: hardware.name)
def test_fp16_and_nothing_else_needs_a_loss_scale(hardware: Hardware) -> None:
    for name in ("auto", "fp32", "tf32", "bf16", "fp16"):
        try:
            chosen = decide_precision(name, hardware)
        except RequestError:
            continue
        assert chosen.needs_loss_scale == (chosen.name == "fp16")


@pytest.mark.parametrize(
    ("requested", "hardware", "because"),
    [
        ("tf32", CPU, "compute capability 8.0"),
        ("tf32", VOLTA, "compute capability 8.0"),
        ("tf32", APPLE, "compute capability 8.0"),
        ("bf16", PASCAL, "no bf16"),
        ("fp16", Hardware("cpu", "old", bf16=True), "no fp16 autocast"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    requested: str, hardware: Hardware, because: str
) -> None:
    with pytest.raises(RequestError) as caught:
        decide_precision(requested, hardware)
    assert because in str(caught.value) and hardware.name in str(caught.value)
    assert caught.value.where == "precision.dtype"


@pytest.mark.parametrize("requested", ["fp8", "float32", ""])
def test_an_unknown_name_is_refused(requested: str) -> None:
    with pytest.raises(RequestError, match="unknown precision"):
        decide_precision(requested, HOPPER)


def test_a_choice_by_name_says_what_it_costs() -> None:
    assert "no gain in speed" in decide_precision("bf16", CPU).reason
    assert "no gain in speed" in decide_precision("fp16", CPU).reason
    assert decide_precision("bf16", HOPPER).reason == "asked for by name"
    assert decide_precision("fp16", VOLTA).reason == "asked for by name"
    assert "bf16 works here" in decide_precision("fp16", HOPPER).reason


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_products_are_narrow_and_weights_and_gradients_wide(name: str, dtype: torch.dtype) -> None:
    precision = choose_precision(name, "cpu")
    assert precision.compute_dtype == dtype
    model = nn.Linear(4, 4)
    seen = []
    with precision.autocast():
        hidden = model(torch.ones(2, 4))
        hidden.register_hook(lambda gradient: seen.append(gradient.dtype))
        loss = nn.functional.mse_loss(hidden, torch.zeros(2, 4))
    loss.backward()
    assert hidden.dtype == dtype
    assert seen == [dtype], "activation gradients are as narrow as the activations"
    assert loss.dtype == torch.float32
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32
    assert model.bias.grad.dtype == torch.float32


def test_without_autocast_the_same_code_runs() -> None:
    for name in ("fp32", "tf32"):
        precision = Precision(name, torch.float32, "cuda", False, "")
        with precision.autocast():
            assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


def test_each_context_is_fresh() -> None:
    precision = choose_precision("bf16", "cpu")
    with precision.autocast():
        with precision.autocast():
            pass
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_what_suits_each_device_type_works_there() -> None:
    names = {}
    for hardware in (HOPPER, CPU, APPLE):
        chosen = decide_precision(SUITED_TO[hardware.device_type], hardware)
        names[hardware.device_type] = (chosen.compute_dtype, chosen.needs_loss_scale)
    assert names == {
        "cuda": (torch.bfloat16, False),
        "cpu": (torch.bfloat16, False),
        "mps": (torch.float16, True),
    }
    assert decide_precision("auto", CPU).reason == "auto: the exact reference on a CPU"
    assert "dtype=fp16 is faster there" in decide_precision("auto", APPLE).reason


def test_an_autocast_that_does_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module.torch, "autocast", lambda *a, **k: torch.no_grad())
    with pytest.raises(RequestError, match=r"computes in torch\.float32"):
        choose_precision("bf16", "cpu")


def test_tf32_covers_matmul_and_convolution_and_fp32_neither() -> None:
    tf32 = decide_precision("tf32", HOPPER)
    mode = apply_matmul_mode(tf32)
    assert (mode.matmul, mode.cudnn_tf32) == ("high", True)
    assert str(mode) == "float32 matmul in TF32, cuDNN convolution in TF32"
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    for name in ("fp32", "bf16", "fp16"):
        apply_matmul_mode(tf32)
        mode = apply_matmul_mode(decide_precision(name, HOPPER))
        assert (mode.matmul, mode.cudnn_tf32) == ("highest", False)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    assert str(mode) == "float32 matmul in float32, cuDNN convolution in float32"


def test_the_mode_is_read_after_a_program_used_the_newer_switches() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    mode = matmul_mode()
    assert (mode.matmul, mode.cudnn_tf32) == ("high", True)
    mode = apply_matmul_mode(decide_precision("fp32", HOPPER))
    assert (mode.matmul, mode.cudnn_tf32) == ("highest", False)
    assert matmul_mode() == mode


def test_the_newer_switches_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    mode = matmul_mode()
    assert (mode.matmul, mode.cudnn_tf32) == ("highest", True)
    monkeypatch.undo()
    apply_matmul_mode(decide_precision("fp32", HOPPER))
