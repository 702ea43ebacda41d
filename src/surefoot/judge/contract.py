"""Judges one run by the contract that it wrote down before it began."""

from __future__ import annotations

from surefoot.judge.verdict import Verdict
from surefoot.observe.run_data import RunData


def verdict_on(run: RunData) -> Verdict | None:
    """The verdict on a run; None where it has no contract."""
    return None
