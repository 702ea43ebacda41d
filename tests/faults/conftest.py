"""What the trials of several ranks are compared with: one launch that nothing befell."""

from __future__ import annotations

import pytest

from faults.launches import Whole


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole.of(tmp_path_factory.mktemp("two-ranks"), 2)
