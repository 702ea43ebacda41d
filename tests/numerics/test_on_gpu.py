"""Precision, determinism and random state on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from surefoot.numerics.determinism import capture_rng, deterministic, preserved_rng, restore_rng
from surefoot.numerics.hardware import available_device_types, probe_hardware
from surefoot.numerics.precision import apply_matmul_mode, choose_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def leave_no_trace():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def test_the_probe_finds_the_device() -> None:
    facts = probe_hardware("cuda")
    assert facts.name and facts.memory_bytes > 2**30
    assert available_device_types()[0] == "cuda"
    if facts.fast_bf16:
        chosen = choose_precision("auto", "cuda")
        assert chosen.name == "bf16" and facts.name in chosen.reason


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_autocast_computes_in_what_was_chosen(name: str) -> None:
    precision = choose_precision(name, "cuda")
    layer = torch.nn.Linear(8, 8, device="cuda")
    with precision.autocast():
        out = layer(torch.ones(2, 8, device="cuda"))
    out.float().sum().backward()
    assert out.dtype == precision.compute_dtype
    assert layer.weight.grad.dtype == torch.float32


def errors() -> tuple[float, float]:
    """Relative errors of a float32 product and convolution against float64."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator, device="cuda") for _ in range(2))
    x = torch.randn(16, 128, 56, 56, generator=generator, device="cuda")
    w = torch.randn(128, 128, 3, 3, generator=generator, device="cuda")
    exact_product = a.double() @ b.double()
    exact_convolution = torch.nn.functional.conv2d(x.double(), w.double())
    product, convolution = a @ b, torch.nn.functional.conv2d(x, w)
    return (
        ((product - exact_product).norm() / exact_product.norm()).item(),
        ((convolution - exact_convolution).norm() / exact_convolution.norm()).item(),
    )


def test_tf32_is_on_for_both_and_off_for_both() -> None:
    if not probe_hardware("cuda").tf32:
        pytest.skip("no TF32 here")
    apply_matmul_mode(choose_precision("tf32", "cuda"))
    product, convolution = errors()
    # TF32 rounds inputs to 10 bits, float32 to 23.
    assert product > 1e-4 and convolution > 1e-4
    apply_matmul_mode(choose_precision("fp32", "cuda"))
    product, convolution = errors()
    assert product < 1e-5 and convolution < 1e-5


def test_random_state_of_the_device_comes_back() -> None:
    state = capture_rng("cuda")
    assert state["torch_device"].device.type == "cpu"
    first = torch.rand(8, device="cuda"), torch.rand(8)
    torch.rand(100, device="cuda")
    restore_rng(state)
    second = torch.rand(8, device="cuda"), torch.rand(8)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    restore_rng(state)
    with preserved_rng("cuda:0"):
        torch.rand(5, device="cuda")
    assert torch.equal(torch.rand(8, device="cuda"), first[0])


def test_a_deterministic_block_repeats_a_scatter() -> None:
    index = torch.randint(64, (100_000,), device="cuda")
    values = torch.randn(100_000, device="cuda")
    with deterministic():
        sums = [torch.zeros(64, device="cuda").index_add(0, index, values) for _ in range(3)]
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
