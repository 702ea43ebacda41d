"""What every test shares: one torch thread, so that neighbours change neither result nor time."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

# Read when torch is first imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults-n",
        default="few",
        help="trials of each test marked `faults_full`: few, stated, or a number",
    )


@pytest.fixture
def num_trials(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """`num_trials(few, stated)`: how often a random fault is tried in this session."""
    asked = request.config.getoption("--faults-n")

    def chosen(few: int, stated: int) -> int:
        counts = {"few": few, "stated": stated}
        return counts[asked] if asked in counts else int(asked)

    return chosen
