"""A process is made ready once: seeded, on its device; ranks draw as they must."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import PropertyMock, patch

import pytest
import torch

from assembly.parts import settings_of
from surefoot.assembly.process import choose_device, join_process, prepare_process, seed_rank
from surefoot.core.errors import RequestError
from surefoot.parallel.layout import ALONE, Place


def test_preparing_seeds_and_joining_draws_nothing() -> None:
    settings = settings_of()
    prepare_process(settings)
    first = (torch.rand(1).item(), random.random())
    prepare_process(settings)
    process = join_process(settings)
    assert (torch.rand(1).item(), random.random()) == first
    assert process.device == torch.device("cpu") and process.place is ALONE


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    missing = "cuda" if not torch.cuda.is_available() else "mps"
    with pytest.raises(RequestError, match=f"no {missing} device") as caught:
        choose_device(missing)  # type: ignore[arg-type]
    assert "cpu" in caught.value.rule


def drawn(random_rank: int) -> float:
    torch.manual_seed(0)
    with patch.object(Place, "random_rank", new_callable=PropertyMock, return_value=random_rank):
        seed_rank(3, replace(ALONE))
    return torch.rand(1).item()


def test_ranks_with_items_of_their_own_draw_their_own_and_rank_0_keeps_the_runs() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1).item()
    assert drawn(0) == expected
    assert len({drawn(0), drawn(1), drawn(2)}) == 3
    assert drawn(1) == drawn(1)
