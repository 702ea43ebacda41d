"""The finite flag agrees with `isfinite` for every pair of kinds of number."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from surefoot.numerics.finite import both_finite

VALUES = [0.0, -0.0, 1.5, -3e38, 1e-45, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(VALUES, VALUES)))
def test_it_is_isfinite_of_both(first: float, second: float) -> None:
    flag = both_finite(torch.tensor(first), torch.tensor(second, dtype=torch.float64))
    assert flag.dtype == torch.bool and flag.ndim == 0
    assert bool(flag) == (math.isfinite(first) and math.isfinite(second))
