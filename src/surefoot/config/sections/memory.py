"""Trades of time for memory. None of them changes a number."""

from __future__ import annotations

from typing import Literal

from surefoot.config.fields import Section, Whole


class MemorySection(Section):
    """What is computed again instead of being kept."""

    recompute: Literal["none", "blocks", "selective"] = "none"
    """Activations of whole blocks, or all but the products of matrices and attention."""
    recompute_every: Whole = 1
    """Of each n-th block."""
