"""Global norm and clip: torch's numbers, bit for bit, and the properties that they promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from surefoot.core.errors import RequestError
from surefoot.numerics.clipping import (
    ClipNorm,
    NoClip,
    global_norm,
    tensor_norms,
    weight_norm,
)

SHAPES = [(3, 4), (5,), (), (2, 2, 2), (0,), (1, 300)]


def gradients_of(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) * scale for s in SHAPES]
    return [g.to(dtype) for g in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_the_norm_is_torchs_bit_for_bit(seed: int, dtype: torch.dtype) -> None:
    gradients = gradients_of(seed, dtype=dtype)
    norm = global_norm(gradients)
    assert norm.dtype == dtype and norm.shape == ()
    assert torch.equal(norm, torch.nn.utils.get_total_norm(gradients))


def test_the_norm_is_that_of_one_long_vector() -> None:
    gradients = gradients_of(0, dtype=torch.float64)
    flat = torch.cat([g.flatten() for g in gradients])
    assert global_norm(gradients).item() == pytest.approx(flat.square().sum().sqrt().item(), 1e-14)


def test_no_gradients_have_norm_zero() -> None:
    norm = global_norm([])
    assert norm.shape == () and norm.item() == 0.0
    ClipNorm(1.0)([], norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_accumulate_in_float32(dtype: torch.dtype) -> None:
    # In bf16 a sum of ones stops growing at 256; in fp16 a square of 300 is infinite.
    gradients = [torch.ones(10_000, dtype=dtype), torch.full((4,), 300.0, dtype=dtype)]
    norm = global_norm(gradients)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(10_000 + 4 * 300.0**2), rel=1e-6)


def test_mixed_gradients_take_the_widest() -> None:
    narrow, single = torch.full((3,), 2.0, dtype=torch.bfloat16), torch.full((3,), 2.0)
    double = torch.full((3,), 2.0, dtype=torch.float64)
    assert global_norm([narrow, single]).dtype == torch.float32
    assert global_norm([narrow, double]).dtype == torch.float64
    assert global_norm([narrow, single, double]).item() == pytest.approx(6.0, abs=1e-15)


def test_the_norm_is_the_same_in_every_precision_of_exact_values() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randint(-8, 9, (64,), generator=generator).double() / 16
    norms = {
        dtype: global_norm([exact.to(dtype)]).item()
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    }
    for norm in norms.values():
        assert norm == pytest.approx(norms[torch.float64], rel=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_makes_the_norm_non_finite(poison: float) -> None:
    gradients = gradients_of(0)
    gradients[3][0, 0, 0] = poison
    assert not torch.isfinite(global_norm(gradients))


def test_tensor_norms_name_the_bad_one() -> None:
    gradients = gradients_of(0)
    gradients[1][2] = float("nan")
    norms = tensor_norms(gradients)
    assert norms.shape == (len(SHAPES),)
    assert [i for i, n in enumerate(norms.tolist()) if not math.isfinite(n)] == [1]
    assert norms[0].item() == pytest.approx(gradients[0].norm().item(), rel=1e-6)


def test_combine_sees_the_local_norm_and_its_answer_is_the_norm() -> None:
    seen = []

    def combine(local: Tensor) -> Tensor:
        seen.append(local.clone())
        return (local.square() + 16.0).sqrt()

    assert global_norm([torch.tensor([3.0])], combine).item() == 5.0
    assert global_norm([], combine).item() == 4.0
    assert [s.item() for s in seen] == [3.0, 0.0]


@pytest.mark.parametrize("scale", [1e-4, 0.2, 1.0, 50.0])
@pytest.mark.parametrize("max_norm", [0.5, 1.0, 3.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_clip_is_torchs_bit_for_bit(scale: float, max_norm: float, dtype: torch.dtype) -> None:
    ours = gradients_of(1, scale, dtype)
    theirs = [nn.Parameter(torch.zeros_like(g)) for g in ours]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    norm = global_norm(ours)
    ClipNorm(max_norm)(ours, norm)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    for gradient, parameter in zip(ours, theirs, strict=True):
        assert torch.equal(gradient, parameter.grad)


def test_the_formula_has_torchs_offset() -> None:
    gradient = torch.tensor([3.0], dtype=torch.float64)
    ClipNorm(1.0)([gradient], global_norm([gradient]))
    assert gradient.item() == 3.0 * (1.0 / (3.0 + 1e-6))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    scale=st.floats(1e-6, 1e6),
    max_norm=st.floats(1e-3, 1e3),
)
def test_direction_is_kept_and_the_bound_holds(seed: int, scale: float, max_norm: float) -> None:
    gradients = gradients_of(seed, scale, torch.float64)
    before = torch.cat([g.flatten() for g in gradients])
    ClipNorm(max_norm)(gradients, global_norm(gradients))
    after = torch.cat([g.flatten() for g in gradients])
    assert after.norm() <= max_norm * (1 + 1e-12)
    cosine = torch.dot(before, after) / (before.norm() * after.norm())
    assert cosine.item() == pytest.approx(1.0, abs=1e-12)
    if before.norm() + 1e-6 <= max_norm:
        assert torch.equal(before, after)


def test_clipping_each_tensor_alone_would_change_the_direction() -> None:
    """Why the norm is global."""
    large, small = torch.tensor([30.0]), torch.tensor([4.0])
    together = [large.clone(), small.clone()]
    ClipNorm(1.0)(together, global_norm(together))
    assert (together[0] / together[1]).item() == pytest.approx(7.5, rel=1e-6)
    alone = [large.clone(), small.clone()]
    for gradient in alone:
        ClipNorm(1.0)([gradient], global_norm([gradient]))
    assert (alone[0] / alone[1]).item() == pytest.approx(1.0, rel=1e-5)


def test_gradients_are_scaled_in_place() -> None:
    gradients = gradients_of(0, 100.0)
    places = [g.data_ptr() for g in gradients]
    norm = global_norm(gradients)
    kept = norm.clone()
    ClipNorm(1.0)(gradients, norm)
    assert [g.data_ptr() for g in gradients] == places
    assert torch.equal(norm, kept), "the norm before the clip is what is logged"


def test_narrow_gradients_are_clipped_too() -> None:
    gradients = [torch.full((4,), 2.0, dtype=torch.bfloat16)]
    ClipNorm(1.0)(gradients, global_norm(gradients))
    assert gradients[0].dtype == torch.bfloat16
    assert gradients[0].tolist() == [0.5] * 4


def test_no_clip_leaves_gradients_alone() -> None:
    gradients = gradients_of(0, 100.0)
    kept = [g.clone() for g in gradients]
    NoClip()(gradients, global_norm(gradients))
    assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True))


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("inf"), float("nan")])
def test_a_norm_out_of_range_is_refused(max_norm: float) -> None:
    with pytest.raises(RequestError) as caught:
        ClipNorm(max_norm)
    assert caught.value.where == "train.clip_norm"


def test_weight_norm_is_over_all_parameters_and_builds_no_graph() -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(1.0)
    norm = weight_norm(model.parameters())
    assert norm.item() == 3.0 and not norm.requires_grad


@pytest.mark.parametrize("values", ["normal", "equal"])
def test_the_norm_of_many_values_does_not_depend_on_their_shards(values: str) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.full((16_000_000,), 1e-3)
    if values == "normal":
        whole = torch.randn(16_000_000, generator=generator)
    right = float(torch.linalg.vector_norm(whole.double()))
    for num_shards in (1, 2, 16):
        norm = float(global_norm(list(whole.chunk(num_shards))))
        assert norm == pytest.approx(right, rel=1e-5)
    across = whole.reshape(4000, 4000).T
    assert float(global_norm([across])) == pytest.approx(right, rel=1e-5)
