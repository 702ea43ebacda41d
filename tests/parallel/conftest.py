"""Ranks for the tests of this folder: four processes that are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
