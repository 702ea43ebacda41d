"""The flag of an update: true for a norm below the limit alone, made once and only when asked."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from surefoot.numerics.clipping import Flag


@pytest.mark.parametrize(
    ("norm", "limit", "expected"),
    [
        (1.0, inf, True),
        (0.0, inf, True),
        (inf, inf, False),
        (nan, inf, False),
        (1.0, 2.0, True),
        (2.0, 2.0, False),
        (2.0, 2.0000002384185791, True),
        (3.0, 2.0, False),
        (nan, 2.0, False),
        (0.0, 0.0, False),
    ],
)
def test_an_update_counts_where_its_norm_is_below_the_limit(
    norm: float, limit: float, expected: bool
) -> None:
    flag = Flag(torch.tensor(norm), limit)()
    assert flag.dtype == torch.bool and flag.shape == ()
    assert bool(flag) is expected


def test_it_is_made_when_asked_for_and_once() -> None:
    norm = torch.tensor(1.0)
    flag = Flag(norm, inf)
    norm.fill_(nan)
    first = flag()
    assert not first  # The norm of the moment of asking.
    norm.fill_(1.0)
    assert flag() is first


def test_it_lies_beside_the_norm() -> None:
    assert Flag(torch.ones((), device="meta"), inf)().device.type == "meta"
